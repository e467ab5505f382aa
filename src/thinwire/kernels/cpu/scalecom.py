"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.scalecom import chunk_argmax, chunk_argmax_sum  # noqa: F401


def warm() -> None:
    pass
