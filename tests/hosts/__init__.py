"""Hosts on real gloo processes."""
