"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.finite import all_finite  # noqa: F401


def warm() -> None:
    pass
