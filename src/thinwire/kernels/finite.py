"""Is every entry finite?"""

from torch import Tensor

from thinwire.kernels import _check
from thinwire.kernels._dispatch import on_cpu
from thinwire.kernels.reference import finite as reference


def all_finite(x: Tensor) -> bool:
    """Whether `x` holds no NaN and no infinity, in one reading pass without a temporary."""
    _check.flat_float("x", x)
    return _impl(x).all_finite(x)


def _impl(x: Tensor):
    if on_cpu(x):
        from thinwire.kernels.cpu import finite

        return finite
    return reference
