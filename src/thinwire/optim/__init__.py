"""Optimizers that average over the ranks in their own `step()`, for loops without DistributedDataParallel."""

from thinwire.optim.adamw import CompressedAdamW

__all__ = ["CompressedAdamW"]
