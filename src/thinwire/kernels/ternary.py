"""TernGrad: -1, 0 or +1 times one scale; decoded by `dequantise(..., bits=2, bucket=numel)`."""

from torch import Tensor

from thinwire.kernels import _check
from thinwire.kernels._dispatch import on_cpu
from thinwire.kernels.reference import ternary as reference


def ternary_quantise(x: Tensor, clip_sigma: float | None, seed: int) -> tuple[Tensor, float]:
    """2-bit codes and their scale: max |x| after clipping at `clip_sigma` population standard deviations.

    Unbiased with respect to the clipped tensor. The scale is 0 for an all-zero tensor, NaN if an entry is not
    finite.
    """
    _check.flat_float("x", x)
    if clip_sigma is not None and not clip_sigma > 0:
        raise ValueError(f"clip_sigma must be positive or None, got {clip_sigma}")
    return _impl(x).ternary_quantise(x, clip_sigma, seed)


def _impl(x: Tensor):
    if on_cpu(x):
        from thinwire.kernels.cpu import ternary

        return ternary
    return reference
