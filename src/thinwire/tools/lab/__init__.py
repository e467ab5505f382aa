"""Emulated networks on one machine."""
