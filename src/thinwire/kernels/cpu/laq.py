"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.laq import grid_step, laq_apply, laq_norms, laq_quantise  # noqa: F401


def warm() -> None:
    pass
