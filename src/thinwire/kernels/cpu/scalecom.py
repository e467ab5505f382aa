"""Chunk-wise arg-max on the CPU: magnitude and position compared as one 64-bit number."""

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _pool
from thinwire.kernels.cpu._jit import F32, I32, kernel
from thinwire.kernels.cpu._tensors import Source

_MAGNITUDE = np.int32(0x7FFFFFFF)
_LOW = np.int64(0xFFFFFFFF)
_TILE = 2048


@kernel
def largest_key(a: F32, first: int) -> int:
    """magnitude * 2^32 + (2^32 - 1 - position): the largest magnitude, the lower position among equals."""
    bits = a.view(np.int32)
    top = np.int64(-1)
    for j in range(len(bits)):
        key = (np.int64(bits[j] & _MAGNITUDE) << 32) | (_LOW - (first + j))
        top = max(top, key)
    return int(top)


@kernel
def argmax_chunks(a: F32, b: F32 | None, base: int, chunk: int, out: I32) -> None:
    """One index per chunk; the range begins with a chunk."""
    scratch = np.empty(_TILE, np.float32)
    for c in range(len(out)):
        end = min((c + 1) * chunk, len(a))
        top = np.int64(-1)
        for lo in range(c * chunk, end, _TILE):
            hi = min(lo + _TILE, end)
            tile = a[lo:hi]
            if b is not None:  # not `summed`: chunks are short, and a call for each would show
                first, second, tile = a[lo:hi], b[lo:hi], scratch[: hi - lo]
                for j in range(len(tile)):
                    tile[j] = first[j] + second[j]
            top = max(top, largest_key(tile, base + lo))
        out[c] = np.int32(_LOW - (top & _LOW))


def chunk_argmax(x: Tensor, grad: Tensor | None, chunk: int) -> Tensor:
    indices = torch.empty(-(-x.numel() // chunk), dtype=torch.int32)
    to = indices.numpy()

    def work(a: F32, b: F32 | None, lo: int) -> None:
        argmax_chunks(a, b, lo, chunk, to[lo // chunk : -(-(lo + len(a)) // chunk)])

    Source(x, grad).run(work, chunk * max(1, _pool.GRAIN // chunk))
    return indices


def warm() -> None:
    x = torch.arange(10.0)
    chunk_argmax(x, None, 3)
    chunk_argmax(x, x, 3)
