"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.ternary import ternary_quantise  # noqa: F401


def warm() -> None:
    pass
