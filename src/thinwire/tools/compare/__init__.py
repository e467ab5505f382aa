"""Train the same model with many methods on one link, and put the results side by side."""
