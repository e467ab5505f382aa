"""What there is to say about each method."""
