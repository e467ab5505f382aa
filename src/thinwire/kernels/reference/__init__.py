"""Plain torch versions of every kernel: any device, and what the compiled kernels are tested against."""
