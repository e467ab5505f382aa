"""LAQ's deterministic quantiser: the difference to the last upload, on a grid as wide as its largest entry.

With R = max |g - last| and step = 2 R / (2^b - 1): q = floor((g - last + R) / step + 1/2), clamped to
0..2^b - 1, and the state becomes last + (q * step - R), in float32 and in this order on every rank.
"""

import math

from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import laq as reference


def laq_quantise(grad: Tensor, last: Tensor, bits: int, update: bool = False) -> tuple[Tensor, float]:
    """Codes of `grad` against `last`: (packed, radius); radius 0 means no change, NaN a non-finite input.

    With `update`, `last` moves as `laq_apply` would move it, in the pass that makes the codes (not if the
    radius is NaN): for a worker that has decided to send whatever the codes are.
    """
    _check_pair(grad, last, bits)
    return dispatch(reference.laq_quantise, grad, last, bits, update)


def laq_apply(last: Tensor, packed: Tensor, radius: float, bits: int) -> None:
    """Move `last` by the decoded difference, in place and bit-identical on every rank."""
    check.flat_float32("last", last)
    check.any_bit_width(bits)
    check.packed(packed, check.packed_length(bits, last.numel()))
    _check_radius(radius)
    dispatch(reference.laq_apply, last, packed, radius, bits)


def laq_norms(grad: Tensor, last: Tensor, packed: Tensor, radius: float, bits: int) -> tuple[float, float]:
    """(|Q - last|^2, |grad - Q|^2) of a payload not yet applied: what LAQ's skipping rule compares."""
    _check_pair(grad, last, bits)
    check.packed(packed, check.packed_length(bits, last.numel()))
    _check_radius(radius)
    return dispatch(reference.laq_norms, grad, last, packed, radius, bits)


def _check_pair(grad: Tensor, last: Tensor, bits: int) -> None:
    check.flat_float("grad", grad)
    check.flat_float32("last", last)
    check.same_size("grad", grad, "last", last)
    check.any_bit_width(bits)


def _check_radius(radius: float) -> None:
    # Applied, a NaN would stay in the state for ever.
    if not math.isfinite(radius) or radius < 0:
        raise PayloadError(f"the radius must be finite and not negative, got {radius}")
