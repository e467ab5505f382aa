"""What thinwire itself costs: `python -m benchmarks`, from the root of the repository."""
