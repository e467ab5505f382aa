"""Seeded random faults against every method and host, with invariants checked after each: `make chaos`."""
