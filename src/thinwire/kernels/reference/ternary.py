"""TernGrad's codes in plain torch."""

import math
import struct

import torch
from torch import Tensor

from thinwire.kernels.reference.quantisation import encode, pack


def ternary_quantise(x: Tensor, clip_sigma: float | None, seed: int) -> tuple[Tensor, float]:
    scale = _scale(x, clip_sigma)
    scales = torch.tensor([scale], dtype=torch.float32, device=x.device)
    return pack(encode(x, scales, 2, max(x.numel(), 1), seed), 2), scale


def _scale(x: Tensor, clip_sigma: float | None) -> float:
    if x.numel() == 0:
        return 0.0
    largest = float(x.float().abs().max())
    if not math.isfinite(largest):
        return math.nan
    wide = x.double()
    return clipped_scale(x.numel(), largest, float(wide.sum()), float((wide * wide).sum()), clip_sigma)


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
