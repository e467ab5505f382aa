"""Error feedback in plain torch: add the gradient to the residual, take a selection out of it."""

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.kernels.reference import gaussian, selection

Select = Callable[[Tensor], tuple[Tensor, Tensor]]


def feedback_topk(residual: Tensor, grad: Tensor, k: int, undo: Tensor | None) -> tuple[Tensor, Tensor]:
    return _feedback(residual, grad, undo, lambda total: selection.topk(total, None, k))


def feedback_gaussiank(residual: Tensor, grad: Tensor, k: int, undo: Tensor | None) -> tuple[Tensor, Tensor]:
    return _feedback(residual, grad, undo, lambda total: gaussian.gaussiank(total, None, k))


def feedback_threshold(
    residual: Tensor, grad: Tensor, t: float, undo: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _feedback(residual, grad, undo, lambda total: selection.threshold(total, None, t))


def commit_feedback(residual: Tensor, grad: Tensor, indices: Tensor) -> None:
    residual += grad.float()
    residual[indices.long()] = 0.0


def feedback_block(
    residual: Tensor, grad: Tensor, start: int, length: int, undo: Tensor | None, clear: Tensor | None
) -> Tensor:
    accumulate(residual, grad, undo)
    if clear is not None:
        clear.zero_()
    where = (start + torch.arange(length, device=residual.device)) % max(residual.numel(), 1)
    values = residual[where]
    residual[where] = 0.0
    return values


def accumulate(residual: Tensor, grad: Tensor, undo: Tensor | None) -> None:
    """residual += grad, with the old residual kept in `undo`, which may be the gradient's own memory."""
    total = residual + grad.float()
    if undo is not None:
        undo.copy_(residual)
    residual.copy_(total)


def _feedback(residual: Tensor, grad: Tensor, undo: Tensor | None, select: Select) -> tuple[Tensor, Tensor]:
    accumulate(residual, grad, undo)
    indices, values = select(residual)
    residual[indices.long()] = 0.0
    return indices, values
