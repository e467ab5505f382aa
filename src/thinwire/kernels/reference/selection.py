"""Selection by magnitude in plain torch."""

import struct

import torch
from torch import Tensor

_MAGNITUDE_BITS = 0x7FFFFFFF


def magnitudes(x: Tensor) -> Tensor:
    """Magnitudes as integers that order like |x|, with NaN above infinity."""
    return x.float().view(torch.int32) & _MAGNITUDE_BITS


def summed(x: Tensor, grad: Tensor | None) -> Tensor:
    """x, or the sum of a residual x and a gradient."""
    return x if grad is None else x + grad.float()


def topk(x: Tensor, grad: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    x = summed(x, grad)
    order = torch.sort(magnitudes(x), descending=True, stable=True).indices
    return take(x, torch.sort(order[:k]).values)


def threshold(x: Tensor, grad: Tensor | None, t: float) -> tuple[Tensor, Tensor]:
    x = summed(x, grad)
    return take(x, torch.nonzero(above(x, t)).flatten())


def above(x: Tensor, t: float) -> Tensor:
    """Which entries exceed `t` in magnitude; NaN does, whatever `t` is."""
    bits: int = struct.unpack("i", struct.pack("f", t))[0]
    return magnitudes(x) > bits


def take(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return indices.to(torch.int32), x[indices].float()
