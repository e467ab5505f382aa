"""Finiteness on the CPU: one reading pass that stops at the first tile with a bad entry."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu._jit import F32, kernel
from thinwire.kernels.cpu._tensors import Source

_TILE = 4096
_EXPONENT = np.int32(0x7F800000)


@kernel
def finite(x: F32) -> bool:
    for lo in range(0, len(x), _TILE):
        bits = x[lo : lo + _TILE].view(np.int32)
        top = np.int32(0)
        for j in range(len(bits)):
            top = max(top, bits[j] & _EXPONENT)
        if top == _EXPONENT:
            return False
    return True


def all_finite(x: Tensor) -> bool:
    return all(Source(x).run(lambda a, b, _: finite(a)))


def warm() -> None:
    all_finite(torch.ones(10))
