"""Natural compression: stochastic rounding to powers of two, one byte an entry (sign and 7 bits of exponent).

The payload has numel + 1 bytes: the codes, then the exponent offset they are relative to. Unbiased, except
that magnitudes above 2^127 round to 2^127. Magnitudes more than 2^126 below the largest round to zero or to
the smallest code; a tensor with a non-finite entry decodes to NaN.
"""

from collections.abc import Sequence

from torch import Tensor

from thinwire.kernels import _check
from thinwire.kernels._dispatch import on_cpu
from thinwire.kernels._natural import LARGEST_OFFSET, NOT_FINITE
from thinwire.kernels.errors import PayloadError
from thinwire.kernels.reference import natural as reference


def natural_quantise(x: Tensor, seed: int) -> Tensor:
    """The payload of `x`: numel + 1 bytes."""
    _check.flat_float("x", x)
    return _impl(x).natural_quantise(x, seed)


def natural_dequantise(packed: Tensor, numel: int, out: Tensor) -> None:
    """Decode one worker's payload into `out`."""
    _check_payload(packed, numel)
    _check.output(out, numel)
    _impl(out, packed).natural_dequantise(packed, numel, out)


def natural_mean(packed: Sequence[Tensor], numel: int, out: Tensor) -> None:
    """out = the mean of all workers' payloads, summed in rank order."""
    _check.workers(packed)
    for codes in packed:
        _check_payload(codes, numel)
    _check.output(out, numel)
    _impl(out, *packed).natural_mean(packed, numel, out)


def _check_payload(packed: Tensor, numel: int) -> None:
    _check.packed(packed, numel + 1)
    offset = int(packed[numel])
    if offset > LARGEST_OFFSET and offset != NOT_FINITE:
        raise PayloadError(f"the exponent offset {offset} is impossible")


def _impl(*tensors: Tensor):
    if on_cpu(*tensors):
        from thinwire.kernels.cpu import natural

        return natural
    return reference
