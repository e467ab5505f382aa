"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.gspar import gspar_budget, gspar_probabilities, gspar_sample  # noqa: F401


def warm() -> None:
    pass
