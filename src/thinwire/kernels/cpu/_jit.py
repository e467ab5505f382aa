"""The only place that touches Numba's decorator, so that everything else can be typed strictly.

The cache on disk is keyed by the text of all kernels: Numba itself looks only at the file of the outermost
function and would keep serving old code after a helper in another file has changed.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core import config
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile on first call, without the GIL, cached on disk."""
    return _compiled(function, fastmath=False)


def reordering(function: Function) -> Function:
    """`kernel` for sums that may be reordered so that they vectorise; NaN and infinity keep their meaning."""
    return _compiled(function, fastmath={"reassoc", "nsz"})


def _compiled(function: Function, fastmath: bool | set[str]) -> Function:
    compiler: Any = numba.njit
    settings: Any = config  # its attributes are made at run time
    outside = settings.CACHE_DIR
    settings.CACHE_DIR = CACHE_DIRECTORY
    try:
        return compiler(nogil=True, cache=True, fastmath=fastmath, error_model="numpy")(function)
    except RuntimeError:
        # Nowhere to write, as in a read-only container: compile in every process.
        return compiler(nogil=True, fastmath=fastmath, error_model="numpy")(function)
    finally:
        settings.CACHE_DIR = outside


def _cache_directory() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(source.read_bytes())
    root = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "thinwire"
    )
    return os.path.join(root, f"kernels-{digest.hexdigest()[:16]}")


CACHE_DIRECTORY = _cache_directory()
