"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.gaussian import finite_moments, gaussiank, moments_from_sums  # noqa: F401


def warm() -> None:
    pass
