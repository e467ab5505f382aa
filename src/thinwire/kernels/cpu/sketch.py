"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.sketch import sketch_insert, sketch_query, sketch_query_topk  # noqa: F401


def warm() -> None:
    pass
