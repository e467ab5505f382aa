"""One bit per entry: 1 where x >= 0 (so -0.0 is 1 and NaN is 0), packed little-endian."""

from collections.abc import Sequence

from torch import Tensor

from thinwire.kernels import _check
from thinwire.kernels._dispatch import on_cpu
from thinwire.kernels.reference import sign as reference


def sign_pack(x: Tensor) -> Tensor:
    """The sign bits of `x`, ceil(n / 8) bytes."""
    _check.flat_float("x", x)
    return _impl(x).sign_pack(x)


def sign_pack_mean(x: Tensor) -> tuple[Tensor, float]:
    """The sign bits and the mean of |x| (summed in double precision), in one pass."""
    _check.flat_float("x", x)
    return _impl(x).sign_pack_mean(x)


def onebit_pack(x: Tensor) -> tuple[Tensor, float, float]:
    """The sign bits, the mean of the entries >= 0 and the (signed) mean of the others, in one pass."""
    _check.flat_float("x", x)
    return _impl(x).onebit_pack(x)


def sign_unpack(packed: Tensor, scale: float, numel: int, out: Tensor) -> None:
    """out = +scale or -scale by the bit."""
    _check_payload(packed, numel)
    _check.output(out, numel)
    _impl(out, packed).sign_unpack(packed, scale, numel, out)


def sign_mean(packed: Sequence[Tensor], scales: Sequence[float], numel: int, out: Tensor) -> None:
    """out = the mean over workers of scale_w * sign_w, summed in rank order."""
    _check.workers(packed, scales)
    for codes in packed:
        _check_payload(codes, numel)
    _check.output(out, numel)
    _impl(out, *packed).sign_mean(packed, scales, numel, out)


def onebit_mean(
    packed: Sequence[Tensor], plus: Sequence[float], minus: Sequence[float], numel: int, out: Tensor
) -> None:
    """out = the mean over workers of (plus_w where the bit is 1, minus_w elsewhere)."""
    _check.workers(packed, plus, minus)
    for codes in packed:
        _check_payload(codes, numel)
    _check.output(out, numel)
    _impl(out, *packed).onebit_mean(packed, plus, minus, numel, out)


def sign_majority(packed: Sequence[Tensor], numel: int) -> Tensor:
    """The bits of the majority, packed; a tie becomes 1 (+)."""
    _check.workers(packed)
    for codes in packed:
        _check_payload(codes, numel)
    return _impl(*packed).sign_majority(packed, numel)


def _check_payload(packed: Tensor, numel: int) -> None:
    _check.packed(packed, _check.packed_length(1, numel))


def _impl(*tensors: Tensor):
    if on_cpu(*tensors):
        from thinwire.kernels.cpu import sign

        return sign
    return reference
