"""Natural compression: stochastic rounding to powers of two, one byte an entry (sign and 7 bits of exponent).

The payload has numel + 1 bytes: the codes, then the exponent offset they are relative to. Unbiased, except
that magnitudes above 2^127 round to 2^127. Magnitudes more than 2^126 below the largest round to zero or to
the smallest code; a tensor with a non-finite entry decodes to NaN.
"""

from collections.abc import Sequence

from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import natural as reference
from thinwire.kernels.reference.natural import LARGEST_OFFSET, NOT_FINITE


def natural_quantise(x: Tensor, seed: int) -> Tensor:
    """The payload of `x`: numel + 1 bytes."""
    check.flat_float("x", x)
    return dispatch(reference.natural_quantise, x, seed)


def natural_dequantise(packed: Tensor, numel: int, out: Tensor) -> None:
    """Decode one worker's payload into `out`."""
    natural_mean([packed], numel, out)


def natural_mean(packed: Sequence[Tensor], numel: int, out: Tensor) -> None:
    """out = the mean of all workers' payloads, summed in rank order."""
    check.workers(packed)
    for codes in packed:
        _check_payload(codes, numel)
    check.output(out, numel)
    dispatch(reference.natural_mean, packed, numel, out)


def _check_payload(packed: Tensor, numel: int) -> None:
    check.packed(packed, numel + 1)
    if packed.device.type != "cpu":
        return  # the host would wait for the offset; an impossible one is decoded as NaN
    offset = int(packed[numel])
    if offset > LARGEST_OFFSET and offset != NOT_FINITE:
        raise PayloadError(f"the exponent offset {offset} is impossible")
