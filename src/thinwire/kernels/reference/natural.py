"""Natural compression in plain torch, and its byte code: a sign bit and seven bits of exponent.

`field` is the biased float32 exponent after stochastic rounding to a power of two (0 is zero, 1 is 2^-126,
254 is 2^127). The code is `field - offset`, 0 meaning zero, where `offset` (0..127) travels in the payload's
last byte and is chosen so that the largest magnitude fits. With max |x| < 1 the offset is 0 and nothing but
subnormal numbers can underflow.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.generator import words
from thinwire.kernels.reference.quantisation import mean_into
from thinwire.kernels.reference.selection import magnitudes

LARGEST_FIELD = 254
INFINITE_FIELD = 255
NOT_FINITE = 255
LARGEST_OFFSET = 127


def offset_for(largest_field: int) -> int:
    """The offset for a tensor whose largest magnitude has this exponent field (rounding may add one)."""
    return max(min(largest_field + 1, LARGEST_FIELD) - 127, 0)


def natural_quantise(x: Tensor, seed: int) -> Tensor:
    n = x.numel()
    packed = torch.zeros(n + 1, dtype=torch.uint8, device=x.device)
    if n == 0:
        return packed
    bits = magnitudes(x).long()
    largest = bits.max() >> 23
    broken = largest >= INFINITE_FIELD
    offset = ((largest + 1).clamp(max=LARGEST_FIELD) - 127).clamp(min=0)  # `offset_for`, on the device
    h = words(seed, n, x.device)
    field = ((bits + (h >> 9)) >> 23).clamp(max=LARGEST_FIELD)
    code = field - offset
    # Too small for the range: to the smallest code with probability 2^-gap, otherwise to zero.
    gap = (1 - code).clamp(0, 10)
    kept = (field > 0) & ((h & 511) < (512 >> gap))
    code = torch.where(code >= 1, code, kept.long())
    negative = (x.float().view(torch.int32) < 0).long()
    packed[:n] = torch.where(broken, 0, code | (negative << 7))
    packed[n] = torch.where(broken, NOT_FINITE, offset)
    return packed


def natural_mean(packed: Sequence[Tensor], numel: int, out: Tensor) -> None:
    mean_into(out, (_decode(codes, numel) for codes in packed), len(packed))


def _decode(packed: Tensor, numel: int) -> Tensor:
    offset = packed[numel].to(torch.int32)
    codes = packed[:numel].to(torch.int32)
    field = codes & 127
    bits = torch.where(field > 0, (field + offset) << 23, 0)
    values = bits.view(torch.float32)
    # An impossible offset is refused on a CPU; elsewhere it aborts the step like NOT_FINITE.
    return torch.where(offset > LARGEST_OFFSET, torch.nan, torch.where(codes >= 128, -values, values))
