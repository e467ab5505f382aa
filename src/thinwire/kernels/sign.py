"""One bit per entry: 1 where x >= 0 (so -0.0 is 1 and NaN is 0), packed little-endian."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import sign as reference
from thinwire.kernels.reference.quantisation import buckets

SIGN_TILE = 4096  # buckets are made of whole tiles


def sign_pack(x: Tensor) -> Tensor:
    """The sign bits of `x`, ceil(n / 8) bytes."""
    check.flat_float("x", x)
    return dispatch(reference.sign_pack, x)


def sign_pack_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sign bits and the mean of |x|, a tensor with one float64, in one pass."""
    check.flat_float("x", x)
    return dispatch(reference.sign_pack_mean, x)


def sign_scales(x: Tensor, bucket: int) -> Tensor:
    """||x||_2^2 / ||x||_1 of every `bucket` entries, 0 for zeros: s sign(x) has the same product with x as x.

    Sums are in double precision and in any order, so backends may differ in the last bit.
    """
    check.flat_float("x", x)
    if bucket < 1:
        raise ValueError(f"bucket must be at least 1, got {bucket}")
    return dispatch(reference.sign_scales, x, bucket)


def sign_pack_means(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    """The sign bits, and the mean of |x| in every bucket of so many entries (float32), in one pass."""
    check.flat_float("x", x)
    check_bucket(bucket)
    return dispatch(reference.sign_pack_means, x, bucket)


def onebit_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sign bits, and the two means of `two_means`, in one pass."""
    check.flat_float("x", x)
    return dispatch(reference.onebit_pack, x)


def sign_unpack(packed: Tensor, scale: Tensor, numel: int, out: Tensor) -> None:
    """out = +scale or -scale by the bit; the scale is a tensor with one entry."""
    sign_mean([packed], [scale], numel, out)


def sign_mean(packed: Sequence[Tensor], scales: Sequence[Tensor], numel: int, out: Tensor) -> None:
    """out = the mean over workers of scale_w * sign_w, summed in rank order."""
    for scale in scales:
        check.scales(scale, 1)
    onebit_mean(packed, [torch.cat([scale, -scale]) for scale in scales], numel, out)


def sign_means(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bucket: int, numel: int, out: Tensor
) -> None:
    """`sign_mean` with a scale for every bucket of so many entries."""
    check_bucket(bucket)
    check.workers(packed, scales)
    for codes, scale in zip(packed, scales, strict=True):
        check.packed(codes, check.packed_length(1, numel))
        check.scales(scale, buckets(numel, bucket))
    check.output(out, numel)
    dispatch(reference.sign_means, packed, scales, bucket, numel, out)


def onebit_mean(packed: Sequence[Tensor], pairs: Sequence[Tensor], numel: int, out: Tensor) -> None:
    """out = the mean over workers of the first of their pair where the bit is 1, of the second elsewhere."""
    _check_payloads(numel, packed, pairs)
    for pair in pairs:
        check.scales(pair, 2)
    check.output(out, numel)
    dispatch(reference.onebit_mean, packed, pairs, numel, out)


def sign_majority(packed: Sequence[Tensor], numel: int) -> Tensor:
    """The bits of the majority, packed; a tie becomes 1 (+)."""
    _check_payloads(numel, packed)
    return dispatch(reference.sign_majority, packed, numel)


def _check_payloads(numel: int, packed: Sequence[Tensor], *scales: Sequence[Tensor]) -> None:
    check.workers(packed, *scales)
    for codes in packed:
        check.packed(codes, check.packed_length(1, numel))


def check_bucket(bucket: int) -> None:
    """A bucket is made of whole tiles."""
    if bucket < 1 or bucket % SIGN_TILE:
        raise ValueError(f"bucket must be a multiple of {SIGN_TILE}, got {bucket}")
