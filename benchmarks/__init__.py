"""What thinwire itself costs: `python -m benchmarks`, from the root of the repository.

Kernels and methods are measured in copies of the tensor: 1 copy is the time to copy the same tensor in
memory, measured in the same run. So the speed of the machine hardly counts.
"""
