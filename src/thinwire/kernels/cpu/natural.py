"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.natural import natural_dequantise, natural_mean, natural_quantise  # noqa: F401


def warm() -> None:
    pass
