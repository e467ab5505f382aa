"""Arrays at addresses: how a kernel takes payloads from any number of workers, compiled once."""

from collections.abc import Sequence

import numba
import numpy as np
from torch import Tensor

from thinwire.kernels.cpu._jit import F32, I32, U8, U64, kernel
from thinwire.kernels.cpu._simd import pointer_to


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
