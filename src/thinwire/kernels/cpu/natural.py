"""Natural compression on the CPU: adding random bits to the float's own bits rounds the exponent up."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu._codes import largest_bits
from thinwire.kernels.cpu._jit import F32, U8, U64, kernel
from thinwire.kernels.cpu._memory import addresses, uint8_at
from thinwire.kernels.cpu._random import counters, word
from thinwire.kernels.cpu._simd import bits_of, float_of
from thinwire.kernels.cpu._tensors import Source, divide, fill, through_float32
from thinwire.kernels.reference.natural import INFINITE_FIELD, LARGEST_FIELD, NOT_FINITE, offset_for

_TILE = 4096
_MAGNITUDE = np.int32(0x7FFFFFFF)
_TOP = np.int32(LARGEST_FIELD)
_512 = np.int32(512)


@kernel
def encode_powers(x: F32, offset: int, counter: np.uint32, key: np.uint32, codes: U8) -> None:
    by = np.int32(offset)
    if by == 0:
        for j in range(len(x)):
            bits = bits_of(x[j])
            h = word(np.uint32(counter + np.uint32(j)), key)
            field = min(np.int32(((bits & _MAGNITUDE) + np.int32(h >> np.uint32(9))) >> 23), _TOP)
            codes[j] = np.uint8(field | ((bits >> 24) & 128))
        return
    for j in range(len(x)):
        bits = bits_of(x[j])
        h = word(np.uint32(counter + np.uint32(j)), key)
        field = min(np.int32(((bits & _MAGNITUDE) + np.int32(h >> np.uint32(9))) >> 23), _TOP)
        code = np.int32(field - by)
        if code < 1:
            gap = min(np.int32(1 - code), np.int32(10))
            kept = field > 0 and np.int32(h & np.uint32(511)) < (_512 >> gap)
            code = np.int32(kept)
        codes[j] = np.uint8(code | ((bits >> 24) & 128))


@kernel
def decode_range(out: F32, base: int, numel: int, packed: U64, workers: int) -> None:
    for lo in range(0, len(out), _TILE):
        hi = min(lo + _TILE, len(out))
        tile = out[lo:hi]
        if workers > 1:
            fill(tile, np.float32(0.0))
        for w in range(workers):
            payload = uint8_at(packed[w], numel + 1)
            codes = payload[base + lo : base + hi]
            by = np.int32(payload[numel])
            if by == NOT_FINITE:
                fill(tile, np.float32(np.nan))
            elif workers > 1:
                for j in range(len(tile)):
                    tile[j] += power(np.int32(codes[j]), by)
            else:
                for j in range(len(tile)):
                    tile[j] = power(np.int32(codes[j]), by)
        divide(tile, workers)


@kernel
def power(code: np.int32, offset: np.int32) -> np.float32:
    field = np.int32(code & 127)
    bits = np.int32((field + offset) << 23) if field > 0 else np.int32(0)
    return float_of(np.int32(bits | np.int32((code & 128) << 24)))


def natural_quantise(x: Tensor, seed: int) -> Tensor:
    n = x.numel()
    packed = torch.empty(n + 1, dtype=torch.uint8)
    source = Source(x)
    largest = max(source.run(lambda a, b, _: largest_bits(a)), default=0) >> 23
    if largest >= INFINITE_FIELD:
        packed.zero_()
        packed[n] = NOT_FINITE
        return packed
    offset = offset_for(largest) if n else 0
    packed[n] = offset
    to = packed.numpy()

    def work(a: F32, _: F32 | None, lo: int) -> None:
        encode_powers(a, offset, *counters(seed, lo), to[lo : lo + len(a)])

    source.run(work)
    return packed


def natural_mean(packed: Sequence[Tensor], numel: int, out: Tensor) -> None:
    codes = addresses(packed)
    through_float32(out, lambda part, lo: decode_range(part, lo, numel, codes, len(packed)))


def warm() -> None:
    packed = natural_quantise(torch.arange(-50.0, 50.0), 1)
    natural_mean([packed, packed], 100, torch.empty(100))
