"""What methods are built of: selectors, memories, index codes, and the two families made of them."""
