"""Is every entry finite?"""

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import finite as reference


def all_finite(x: Tensor) -> bool:
    """Whether `x` holds no NaN and no infinity, in one reading pass without a temporary."""
    check.flat_float("x", x)
    return dispatch(reference.all_finite, x)
