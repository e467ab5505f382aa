"""TernGrad: -1, 0 or +1 times one scale; decoded by `dequantise(..., bits=2, bucket=numel)`."""

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import ternary as reference


def ternary_quantise(x: Tensor, clip_sigma: float | None, seed: int) -> tuple[Tensor, Tensor]:
    """2-bit codes and their scale: max |x| after clipping at `clip_sigma` population standard deviations.

    The scale is a tensor with one float32. Unbiased with respect to the clipped tensor. The scale is 0 for an
    all-zero tensor, NaN if an entry is not finite.
    """
    check.flat_float("x", x)
    if clip_sigma is not None and not clip_sigma > 0:
        raise ValueError(f"clip_sigma must be positive or None, got {clip_sigma}")
    return dispatch(reference.ternary_quantise, x, clip_sigma, seed)
