"""Mutants: the source broken in one place, and the tests that notice."""
