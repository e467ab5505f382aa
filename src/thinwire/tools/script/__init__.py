"""Training scripts as they are: local workers that run one, and what they report."""
