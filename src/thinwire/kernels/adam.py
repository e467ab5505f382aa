"""What `adam` does around its exchange: the momentum of a step, and what the step leaves behind."""

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import adam as reference


def adam_momentum(
    m: Tensor, grad: Tensor, roots: tuple[Tensor, Tensor, Tensor] | None, beta: float, out: Tensor
) -> Tensor | None:
    """out = beta m + (1 - beta) c grad; returns hypot(own, grad), which the next step's own may become.

    `roots` are (own, s_0, s). c is s_0 / s, and 1 where that is not finite; without roots c is 1, and None is
    returned. `out` has the type of `grad`, also float64, and may be its memory. m and the roots are float32.
    """
    check.flat_float32("m", m)
    _check(grad, "grad", m)
    _check(out, "out", m)
    for root in roots or ():
        check.flat_float32("a root", root)
        check.same_size("m", m, "a root", root)
    if out.dtype != grad.dtype:
        raise TypeError(f"out must be {grad.dtype} like grad, not {out.dtype}")
    return dispatch(reference.adam_momentum, m, grad, roots, beta, out)


def adam_keep(out: Tensor, s: Tensor | None, m: Tensor) -> None:
    """m = out; then out = 0 where s is 0. m and s are float32."""
    check.flat_float32("m", m)
    _check(out, "out", m)
    if s is not None:
        check.flat_float32("s", s)
        check.same_size("m", m, "s", s)
    dispatch(reference.adam_keep, out, s, m)


def _check(x: Tensor, name: str, m: Tensor) -> None:
    check.flat_any_float(name, x)
    check.same_size("m", m, name, x)
