"""Memory for kernels: scratch that is used again and again, and arrays at addresses.

Pages faulted in anew cost more than the kernels themselves. By addresses a kernel takes payloads from any
number of workers, compiled once.
"""

import threading
from collections.abc import Sequence
from typing import TypeVar

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.cpu._jit import F32, I32, U8, U64, kernel
from thinwire.kernels.cpu._simd import pointer_to

S = TypeVar("S", bound=np.generic)


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[tuple[str, str], NDArray[np.uint8]] = {}


_buffers = _Buffers()


def scratch_array(name: str, dtype: type[S], size: int) -> NDArray[S]:
    """At least `size` entries that stay this thread's until it asks for the same name and type again."""
    key = (name, dtype.__name__)
    needed = size * np.dtype(dtype).itemsize
    held = _buffers.arrays.get(key)
    if held is None or held.nbytes < needed:
        held = np.empty(needed + needed // 8, np.uint8)
        _buffers.arrays[key] = held
    return held[:needed].view(dtype)


def scratch_tensor(name: str, size: int) -> Tensor:
    return torch.from_numpy(scratch_array(name, np.float32, size))


@kernel
def uint8_at(address: int, length: int) -> U8:
    return numba.carray(pointer_to(address, numba.uint8), (length,))


@kernel
def int32_at(address: int, length: int) -> I32:
    return numba.carray(pointer_to(address, numba.int32), (length,))


@kernel
def float32_at(address: int, length: int) -> F32:
    return numba.carray(pointer_to(address, numba.float32), (length,))


def addresses(tensors: Sequence[Tensor]) -> U64:
    """Where the tensors' data begins; the caller keeps the tensors until the kernel has returned."""
    return np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
