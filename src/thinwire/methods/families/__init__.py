"""What methods share: error feedback, index codes, and the families of sparse, quantised and lazy methods."""
