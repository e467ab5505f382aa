"""Stochastic b-bit quantisation with one scale per bucket (QSGD), packed into bytes.

For b > 1 a code q in 0..2s means (q - s) * (scale / s) with s = 2^(b-1) - 1; for b = 1 it means
(2 q - 1) * scale. Codes are packed little-endian, ceil(b n / 8) bytes. A zero bucket decodes to exact zeros;
a bucket with a non-finite entry has scale NaN and decodes to NaN.
"""

from collections.abc import Sequence

from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import quantisation as reference
from thinwire.kernels.reference.quantisation import NORMS, buckets


def quantise(x: Tensor, bits: int, bucket: int, norm: str, seed: int) -> tuple[Tensor, Tensor]:
    """Unbiased codes of `x`: (packed uint8, one float32 scale per `bucket` entries), norm "max" or "l2"."""
    check.flat_float("x", x)
    check.bit_width(bits)
    _check_bucket(bucket)
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {NORMS}, not {norm!r}")
    return dispatch(reference.quantise, x, bits, bucket, norm, seed)


def dequantise(packed: Tensor, scales: Tensor, bits: int, bucket: int, numel: int, out: Tensor) -> None:
    """Decode one worker's payload into `out`."""
    dequantise_mean([packed], [scales], bits, bucket, numel, out)


def dequantise_mean(
    packed: Sequence[Tensor], scales: Sequence[Tensor], bits: int, bucket: int, numel: int, out: Tensor
) -> None:
    """out = the mean of all workers' payloads, summed in rank order."""
    check.workers(packed, scales)
    for codes, scale in zip(packed, scales, strict=True):
        _check_payload(codes, scale, bits, bucket, numel)
    check.output(out, numel)
    dispatch(reference.dequantise_mean, packed, scales, bits, bucket, numel, out)


def _check_bucket(bucket: int) -> None:
    if bucket < 1:
        raise ValueError(f"bucket must be at least 1, got {bucket}")


def _check_payload(packed: Tensor, scales: Tensor, bits: int, bucket: int, numel: int) -> None:
    check.bit_width(bits)
    _check_bucket(bucket)
    check.packed(packed, check.packed_length(bits, numel))
    check.scales(scales, buckets(numel, bucket))
