"""Signs of residual + gradient with a scale for every bucket, of a tensor in stretches, as two shots send it.

All stretches have `share` entries, a multiple of 8; the last ones may be shorter or empty. Buckets are
counted from the beginning of each stretch. Zero counts as +. The sum of residual and gradient is not stored:
nothing is to be undone if a step is not committed.
"""

from collections.abc import Sequence

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import sign_feedback as reference
from thinwire.kernels.reference.quantisation import buckets
from thinwire.kernels.sign import check_bucket


def feedback_signs(residual: Tensor, grad: Tensor, bucket: int, share: int) -> tuple[Tensor, Tensor]:
    """The sign bits of residual + grad, and their mean magnitudes, as `sign_pack_means` of each stretch."""
    check.residual_and_grad(residual, grad)
    _check_stretches(bucket, share)
    return dispatch(reference.feedback_signs, residual, grad, bucket, share)


def commit_signs(residual: Tensor, grad: Tensor, scales: Tensor, bucket: int, share: int) -> None:
    """residual += grad, minus what `feedback_signs` has coded with these scales."""
    check.residual_and_grad(residual, grad)
    _check_stretches(bucket, share)
    check.scales(scales, reference.scales_in(residual.numel(), bucket, share))
    dispatch(reference.commit_signs, residual, grad, scales, bucket, share)


def signs_again(
    residual: Tensor, grad: Tensor, packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of residual + grad and the codes of it by other workers; its sign bits and mean magnitudes."""
    check.residual_and_grad(residual, grad)
    _check_payloads(packed, scales, bucket, residual.numel())
    return dispatch(reference.signs_again, residual, grad, packed, scales, bucket)


def lost_by_signs(x: Tensor, scales: Tensor, bucket: int, factor: float, out: Tensor) -> None:
    """out = factor times what the signs of x with these scales lose. All are float32."""
    check.flat_float32("x", x)
    check.flat_float32("out", out)
    check.same_size("x", x, "out", out)
    check_bucket(bucket)
    check.scales(scales, buckets(x.numel(), bucket))
    dispatch(reference.lost_by_signs, x, scales, bucket, factor, out)


def signs_joined(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int, share: int, out: Tensor
) -> None:
    """out = the stretches, decoded. Each code has the length of that of the longest."""
    check.flat_float("out", out)
    _check_stretches(bucket, share)
    _check_payloads(packed, scales, bucket, min(share, out.numel()))
    if len(packed) * share < out.numel():
        raise ValueError(f"{len(packed)} stretches of {share} entries do not make {out.numel()}")
    dispatch(reference.signs_joined, packed, scales, bucket, share, out)


def _check_stretches(bucket: int, share: int) -> None:
    check_bucket(bucket)
    if share < 8 or share % 8:
        raise ValueError(f"share must be a multiple of 8, got {share}")


def _check_payloads(packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int, numel: int) -> None:
    check_bucket(bucket)
    check.workers(packed, scales)
    size, count = check.packed_length(1, numel), buckets(numel, bucket)
    for codes, scale in zip(packed, scales, strict=True):
        check.packed(codes, size)
        check.scales(scale, count)
