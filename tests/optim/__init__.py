"""Optimizers of ours on real gloo processes."""
