"""Natural compression on a GPU: whether a tensor is finite, and its offset, stay on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.generator import words
from thinwire.kernels.reference import natural as reference
from thinwire.kernels.reference.natural import INFINITE_FIELD, LARGEST_FIELD, NOT_FINITE
from thinwire.kernels.reference.selection import magnitudes
from thinwire.kernels.triton._compiled import compiled, keys_of, mean_of, number


def natural_quantise(x: Tensor, seed: int) -> Tensor:
    return _quantise(x, keys_of(seed, x)) if x.numel() else reference.natural_quantise(x, seed)


def natural_mean(packed: Sequence[Tensor], numel: int, out: Tensor) -> None:
    if numel:
        _mean(list(packed), number(out, len(packed)), out)


@compiled
def _quantise(x: Tensor, keys: Tensor) -> Tensor:
    bits = magnitudes(x).long()
    largest = bits.max() >> 23
    offset = ((largest + 1).clamp(max=LARGEST_FIELD) - 127).clamp(min=0)
    h = words(keys, x.numel(), x.device)
    field = ((bits + (h >> 9)) >> 23).clamp(max=LARGEST_FIELD)
    code = field - offset
    gap = (1 - code).clamp(0, 10)
    kept = (field > 0) & ((h & 511) < (512 >> gap))
    code = torch.where(code >= 1, code, kept.long())
    code = code | ((x.float().view(torch.int32) < 0).long() << 7)
    finite = largest < INFINITE_FIELD
    codes = torch.where(finite, code, 0)
    last = torch.where(finite, offset, NOT_FINITE)
    return torch.cat((codes, last.view(1))).to(torch.uint8)


@compiled
def _mean(packed: list[Tensor], workers: Tensor, out: Tensor) -> None:
    def decoded(code: Tensor) -> Tensor:
        offset = code[out.numel()].to(torch.int32)
        codes = code[: out.numel()].to(torch.int32)
        field = codes & 127
        values = torch.where(field > 0, (field + offset) << 23, 0).view(torch.float32)
        values = torch.where(codes >= 128, -values, values)
        return torch.where(offset == NOT_FINITE, torch.nan, values)

    out.copy_(mean_of([decoded(code) for code in packed], workers))
