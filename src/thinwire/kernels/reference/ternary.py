"""TernGrad's codes in plain torch."""

import math
import struct

import torch
from torch import Tensor

from thinwire.kernels.reference.quantisation import encode, pack


def ternary_quantise(x: Tensor, clip_sigma: float | None, seed: int) -> tuple[Tensor, Tensor]:
    scale = _scale(x, clip_sigma)
    return pack(encode(x, scale, 2, max(x.numel(), 1), seed), 2), scale


def _scale(x: Tensor, clip_sigma: float | None) -> Tensor:
    """`clipped_scale` on the device, as one float32; NaN if an entry is not finite."""
    if x.numel() == 0:
        return torch.zeros(1, device=x.device)
    largest = x.float().abs().max().view(1)
    scale = largest
    if clip_sigma is not None:
        wide = x.double()
        total, squares = wide.sum(), (wide * wide).sum()
        variance = (squares - total * (total / x.numel())).clamp(min=0.0) / x.numel()
        bound = (clip_sigma * variance.sqrt()).view(1)
        scale = torch.where((bound == 0.0) | (bound >= largest), largest, bound.float())
    return torch.where(largest.isfinite(), scale, torch.nan)


def clipped_scale(
    numel: int, largest: float, total: float, squares: float, clip_sigma: float | None
) -> float:
    """max |x| after clipping at `clip_sigma` population standard deviations, as a float32 value."""
    if clip_sigma is None:
        return largest
    variance = max(squares - total * (total / numel), 0.0) / numel
    bound = clip_sigma * math.sqrt(variance)
    # A constant vector has no deviation to clip at: clipping it to nothing would lose it.
    if bound == 0.0 or bound >= largest:
        return largest
    return struct.unpack("f", struct.pack("f", bound))[0]
