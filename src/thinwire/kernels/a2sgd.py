"""A2SGD: the mean of the entries >= 0, the mean of the others, and the exchange of local for global means."""

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import a2sgd as reference


def two_means(x: Tensor) -> Tensor:
    """The mean of the entries >= 0 and the (signed) mean of the others, as float32; 0 for an empty class.

    Sums are in double precision.
    """
    check.flat_float("x", x)
    return dispatch(reference.two_means, x)


def a2sgd_apply(x: Tensor, own: Tensor, mean: Tensor, out: Tensor) -> None:
    """out = x - local mean + global mean, per sign class; `out` may be `x`.

    `own` and `mean` are those of `two_means`. They are subtracted first, so equal means leave `x` as it is
    (only -0.0 becomes 0.0).
    """
    check.flat_float("x", x)
    check.output(out, x.numel())
    dispatch(reference.a2sgd_apply, x, (mean.double() - own.double()).float(), out)
