"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.quantisation import (  # noqa: F401
    bucket_scales,
    decode,
    dequantise,
    dequantise_mean,
    encode,
    pack,
    quantise,
    unpack,
)


def warm() -> None:
    pass
