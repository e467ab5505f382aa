"""What runs on the device, in Triton's language; the modules one level up start it."""
