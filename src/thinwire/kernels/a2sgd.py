"""A2SGD: the mean of the entries >= 0, the mean of the others, and the exchange of local for global means."""

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import a2sgd as reference


def two_means(x: Tensor) -> tuple[float, float]:
    """(mean of the entries >= 0, signed mean of the others), in double precision; 0 for an empty class."""
    check.flat_float("x", x)
    return dispatch(reference.two_means, x)


def a2sgd_apply(
    x: Tensor, mu_plus: float, mu_minus: float, gmu_plus: float, gmu_minus: float, out: Tensor
) -> None:
    """out = x - local mean + global mean, per sign class; `out` may be `x`.

    The two means are subtracted first, so equal means leave `x` as it is (only -0.0 becomes 0.0).
    """
    check.flat_float("x", x)
    check.output(out, x.numel())
    dispatch(reference.a2sgd_apply, x, gmu_plus - mu_plus, gmu_minus - mu_minus, out)
