"""Not compiled yet: the torch reference."""

from thinwire.kernels.reference.feedback import (  # noqa: F401
    accumulate,
    commit_feedback,
    feedback_block,
    feedback_gaussiank,
    feedback_threshold,
    feedback_topk,
    select_feedback_gaussiank,
    select_feedback_threshold,
    select_feedback_topk,
)


def warm() -> None:
    pass
