"""Error feedback fused with selection: residual += gradient, take the selected entries out of the residual.

A step can be undone exactly: pass `undo` and copy it back, or select without writing and commit afterwards.
The residual is float32; the gradient may be float32, bfloat16 or float16.
"""

from torch import Tensor

from thinwire.errors import PayloadError
from thinwire.kernels import check
from thinwire.kernels.dispatch import dispatch
from thinwire.kernels.reference import feedback as reference
from thinwire.kernels.reference import gaussian, selection
from thinwire.kernels.scatter import ascending_in_range
from thinwire.kernels.selection import checked_threshold


def feedback_topk(
    residual: Tensor, grad: Tensor, k: int, undo: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """residual += grad; take its exact top-k out: (indices, values of the sums), as `topk` orders them.

    With `undo` (float32, same size, possibly the memory of `grad` itself) the old residual is written there
    in the same pass; `residual.copy_(undo)` then restores it bit for bit.
    """
    check.residual_and_grad(residual, grad, undo)
    return dispatch(reference.feedback_topk, residual, grad, check.count(k, residual.numel()), undo)


def feedback_gaussiank(
    residual: Tensor, grad: Tensor, k: int, undo: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`feedback_topk` with Gaussian-k's threshold in place of the exact one: about k entries."""
    check.residual_and_grad(residual, grad, undo)
    return dispatch(reference.feedback_gaussiank, residual, grad, check.count(k, residual.numel()), undo)


def feedback_threshold(
    residual: Tensor, grad: Tensor, t: float, undo: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`feedback_topk` with a fixed threshold: every |residual + grad| > t, and NaN."""
    check.residual_and_grad(residual, grad, undo)
    return dispatch(reference.feedback_threshold, residual, grad, checked_threshold(t), undo)


def select_feedback_topk(residual: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What `feedback_topk` would select, writing nothing; `commit_feedback` finishes the step."""
    check.residual_and_grad(residual, grad)
    return dispatch(selection.topk, residual, grad, check.count(k, residual.numel()))


def select_feedback_gaussiank(residual: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What `feedback_gaussiank` would select, writing nothing."""
    check.residual_and_grad(residual, grad)
    return dispatch(gaussian.gaussiank, residual, grad, check.count(k, residual.numel()))


def select_feedback_threshold(residual: Tensor, grad: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """What `feedback_threshold` would select, writing nothing."""
    check.residual_and_grad(residual, grad)
    return dispatch(selection.threshold, residual, grad, checked_threshold(t))


def commit_feedback(residual: Tensor, grad: Tensor, indices: Tensor) -> None:
    """residual += grad, then zero at `indices` (strictly ascending int32), in one pass.

    On other devices than a CPU the indices must have been checked before (`ascending_flag`).
    """
    check.residual_and_grad(residual, grad)
    if residual.device.type == "cpu" and not ascending_in_range(indices, residual.numel()):
        raise PayloadError(f"indices must ascend strictly within [0, {residual.numel()})")
    dispatch(reference.commit_feedback, residual, grad, indices)


def feedback_block(
    residual: Tensor,
    grad: Tensor,
    start: int,
    length: int,
    undo: Tensor | None = None,
    clear: Tensor | None = None,
) -> Tensor:
    """residual += grad; take the block [start, start + length) out of it, wrapping around the end.

    `clear` (same size, possibly the memory of `grad` itself; not together with `undo`) is zeroed in the same
    pass: the output that will receive the block.
    """
    check.residual_and_grad(residual, grad, undo)
    if clear is not None:
        if undo is not None:
            raise ValueError("feedback_block takes undo or clear, not both")
        check.flat_float("clear", clear)
        check.same_size("residual", residual, "clear", clear)
    n = residual.numel()
    if not 0 <= length <= n or not 0 <= start < max(n, 1):
        raise ValueError(f"block [{start}, {start} + {length}) does not fit into {n} entries")
    return dispatch(reference.feedback_block, residual, grad, start, length, undo, clear)
