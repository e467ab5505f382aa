"""The plots of a comparison."""
