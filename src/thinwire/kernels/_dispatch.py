"""One decision: do these tensors go to the compiled CPU kernels or to the torch reference?"""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32)


class _Choice:
    """Process-wide: the drivers' threads must see what the test or the benchmark asked for."""

    reference: bool = os.environ.get("THINWIRE_KERNELS", "") == "reference"


@contextmanager
def use_reference() -> Generator[None]:
    """Send every kernel call to the torch reference inside the block (in all threads)."""
    before = _Choice.reference
    _Choice.reference = True
    try:
        yield
    finally:
        _Choice.reference = before


def on_cpu(*tensors: Tensor) -> bool:
    """Whether the compiled kernels can take these tensors."""
    if _Choice.reference:
        return False
    return all(t.device.type == "cpu" and t.is_contiguous() and t.dtype in _TYPES for t in tensors)
