"""Natural compression in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels._natural import INFINITE_FIELD, LARGEST_FIELD, NOT_FINITE, offset_for
from thinwire.kernels.reference._random import words
from thinwire.kernels.reference.selection import magnitudes


def natural_quantise(x: Tensor, seed: int) -> Tensor:
    n = x.numel()
    packed = torch.zeros(n + 1, dtype=torch.uint8, device=x.device)
    if n == 0:
        return packed
    bits = magnitudes(x).long()
    largest = int(bits.max()) >> 23
    if largest >= INFINITE_FIELD:
        packed[n] = NOT_FINITE
        return packed
    offset = offset_for(largest)
    h = words(seed, n, x.device)
    field = ((bits + (h >> 9)) >> 23).clamp(max=LARGEST_FIELD)
    code = field - offset
    # Too small for the range: to the smallest code with probability 2^-gap, otherwise to zero.
    gap = (1 - code).clamp(0, 10)
    kept = (field > 0) & ((h & 511) < (512 >> gap))
    code = torch.where(code >= 1, code, kept.long())
    negative = (x.float().view(torch.int32) < 0).long()
    packed[:n] = (code | (negative << 7)).to(torch.uint8)
    packed[n] = offset
    return packed


def natural_dequantise(packed: Tensor, numel: int, out: Tensor) -> None:
    out.copy_(_decode(packed, numel))


def natural_mean(packed: Sequence[Tensor], numel: int, out: Tensor) -> None:
    total = torch.zeros(numel, dtype=torch.float32, device=out.device)
    for codes in packed:
        total += _decode(codes, numel)
    out.copy_(total / len(packed))


def _decode(packed: Tensor, numel: int) -> Tensor:
    offset = int(packed[numel])
    if offset == NOT_FINITE:
        return torch.full((numel,), torch.nan, device=packed.device)
    codes = packed[:numel].to(torch.int32)
    field = codes & 127
    bits = torch.where(field > 0, (field + offset) << 23, 0)
    values = bits.view(torch.float32)
    return torch.where(codes >= 128, -values, values)
