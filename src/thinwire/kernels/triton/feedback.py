"""Error feedback in Triton: the pass that adds the gradient already takes candidates out, counts or sums."""

import torch
from torch import Tensor

from thinwire.kernels.triton import _candidates
from thinwire.kernels.triton._candidates import Buffer, Source
from thinwire.kernels.triton._launch import launch_tiles, over
from thinwire.kernels.triton.gaussian import select_by_moments
from thinwire.kernels.triton.programs import candidates
from thinwire.kernels.triton.programs import feedback as programs
from thinwire.kernels.triton.selection import fixed_limit, keep_largest, write_counted


def feedback_topk(residual: Tensor, grad: Tensor, k: int, undo: Tensor | None) -> tuple[Tensor, Tensor]:
    n = residual.numel()
    out = _candidates.empty_selection(residual, k)
    guess = _candidates.guessed_capacity(n, k) if k else None
    if guess is None:
        _accumulate(residual, grad, undo)
        source = Source(residual)
        return keep_largest(source, _candidates.nothing(residual), k, out, residual) if k else out
    rank, capacity = guess
    above = _candidates.sampled_threshold(_candidates.sample_of(Source(residual, grad)), rank)
    buffer = Buffer.empty(residual, n, capacity)
    launch_tiles(
        programs.accumulate_taking, n, residual, grad, n, undo, above, capacity, buffer.total, *buffer.parts
    )
    launch_tiles(
        candidates.put_back, capacity, residual, buffer.indices, buffer.values, buffer.total, k, capacity
    )
    return keep_largest(Source(residual), buffer, k, out, residual, restore=True)


def feedback_gaussiank(residual: Tensor, grad: Tensor, k: int, undo: Tensor | None) -> tuple[Tensor, Tensor]:
    n = residual.numel()
    if k in (0, n):
        return feedback_topk(residual, grad, k, undo)
    sums = torch.empty(over(n), 3, dtype=torch.float64, device=residual.device)
    launch_tiles(programs.accumulate_moments, n, residual, grad, n, undo, sums)
    return select_by_moments(Source(residual), k, sums.sum(0), residual)


def feedback_threshold(
    residual: Tensor, grad: Tensor, t: float, undo: Tensor | None
) -> tuple[Tensor, Tensor]:
    n = residual.numel()
    limit = fixed_limit(residual, t)
    number = torch.empty(2, over(n), dtype=torch.int32, device=residual.device)
    launch_tiles(programs.accumulate_counting, n, residual, grad, n, undo, limit.high, number[0], number[1])
    return write_counted(Source(residual), _candidates.nothing(residual), limit, number, residual)


def commit_feedback(residual: Tensor, grad: Tensor, indices: Tensor) -> None:
    _accumulate(residual, grad, None)
    launch_tiles(programs.zero_at, indices.numel(), residual, indices, indices.numel())


def feedback_block(
    residual: Tensor, grad: Tensor, start: int, length: int, undo: Tensor | None, clear: Tensor | None
) -> Tensor:
    n = residual.numel()
    values = torch.empty(length, dtype=torch.float32, device=residual.device)
    launch_tiles(programs.accumulate_block, n, residual, grad, n, undo, clear, start, length, values)
    return values


def _accumulate(residual: Tensor, grad: Tensor, undo: Tensor | None) -> None:
    launch_tiles(programs.accumulate, residual.numel(), residual, grad, residual.numel(), undo)
