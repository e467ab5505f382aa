"""Error feedback on the CPU: the first pass adds the gradient and already collects or sums.

Top-k takes every sum above a sampled threshold out of the residual while it is in the cache, and puts the few
back that the exact selection rejects, so the entries sent are not touched again.
"""

from bisect import bisect_right

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _accumulate, _collect, _pool
from thinwire.kernels.cpu._exact import keep_largest
from thinwire.kernels.cpu._jit import F32, F64, I32
from thinwire.kernels.cpu._memory import scratch_array
from thinwire.kernels.cpu._sums import rows_for, total_of
from thinwire.kernels.cpu._tensors import Source, view
from thinwire.kernels.cpu.gaussian import select_by_moments
from thinwire.kernels.cpu.selection import (
    collect_counted,
    empty_selection,
    guess_threshold,
    magnitude_bits,
    topk,
    topk_of,
)


def feedback_topk(residual: Tensor, grad: Tensor, k: int, undo: Tensor | None) -> tuple[Tensor, Tensor]:
    guess = guess_threshold(Source(residual, grad), k) if k else None
    if guess is None:
        _add(residual, grad, undo)
        return _take(residual, *topk_of(Source(residual), k))
    found = _taken(residual, grad, undo, *guess)
    if found is None or len(found[0]) < k:
        if found is not None:
            _accumulate.put_back(view(residual), *found)
        return _take(residual, *topk_of(Source(residual), k))
    indices, values = empty_selection(k)
    keep_largest(*found, k, indices.numpy(), values.numpy(), view(residual))
    return indices, values


def feedback_gaussiank(residual: Tensor, grad: Tensor, k: int, undo: Tensor | None) -> tuple[Tensor, Tensor]:
    source = Source(residual)
    if k in (0, source.numel):
        _add(residual, grad, undo)
        return _take(residual, *topk_of(source, k))

    def work(r: F32, g: F32, u: F32 | None, swap: bool, _: int) -> F64:
        rows = rows_for(r, 3)
        _accumulate.accumulate_moments(r, g, u, swap, _pool.GRAIN, rows)
        return rows

    count, total, squares = total_of(_accumulate.run(residual, grad, undo, work))
    return _take(residual, *select_by_moments(source, k, (int(count), total, squares)))


def feedback_threshold(
    residual: Tensor, grad: Tensor, t: float, undo: Tensor | None
) -> tuple[Tensor, Tensor]:
    above = magnitude_bits(t)

    def work(r: F32, g: F32, u: F32 | None, swap: bool, _: int) -> int:
        return _accumulate.accumulate_counting(r, g, u, swap, above)

    counts = _accumulate.run(residual, grad, undo, work)
    source = Source(residual)
    if not _accumulate.direct(grad):
        counts = source.run(lambda a, b, _: _collect.count(a, b, above))  # cut as the source will be
    indices, values = empty_selection(sum(counts))
    collect_counted(source, above, counts, indices.numpy(), values.numpy())
    return _take(residual, indices, values)


def commit_feedback(residual: Tensor, grad: Tensor, indices: Tensor) -> None:
    where = indices.numpy()
    _accumulate.run(
        residual, grad, None, lambda r, g, u, swap, lo: _accumulate.accumulate_zeroing(r, g, lo, where)
    )


def feedback_block(
    residual: Tensor, grad: Tensor, start: int, length: int, undo: Tensor | None, clear: Tensor | None
) -> Tensor:
    if clear is None:
        _add(residual, grad, undo)
    else:
        _add_clearing(residual, grad, clear)
    values = torch.empty(length, dtype=torch.float32)
    first = min(length, residual.numel() - start)
    for block, to in (
        (residual[start : start + first], values[:first]),
        (residual[: length - first], values[first:]),
    ):
        to.copy_(block)
        block.zero_()
    return values


def _add(residual: Tensor, grad: Tensor, undo: Tensor | None) -> None:
    if undo is None:
        residual.add_(grad)
    else:
        _accumulate.run(residual, grad, undo, lambda r, g, u, swap, _: _accumulate.accumulate(r, g, u, swap))


def _add_clearing(residual: Tensor, grad: Tensor, clear: Tensor) -> None:
    if not (_accumulate.direct(grad) and clear.dtype == torch.float32):
        _add(residual, grad, None)
        clear.zero_()
        return
    itself = _accumulate.swapped(grad, clear)

    def work(lo: int, hi: int) -> None:
        other = None if itself else view(clear)[lo:hi]
        _accumulate.accumulate_clearing(view(residual)[lo:hi], view(grad)[lo:hi], other)

    _pool.run_cuts(work, _pool.cuts(residual.numel()))


def _take(residual: Tensor, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    _accumulate.zero_at(view(residual), indices.numpy())
    return indices, values


def _taken(
    residual: Tensor, grad: Tensor, undo: Tensor | None, above: int, room: int
) -> tuple[I32, F32] | None:
    """Accumulate, and take the sums above out of the residual.

    None means that there was no room for all of them: the residual is then the plain sum.
    """
    capacity = room + _collect.TILE
    starts = [lo for lo, _ in _pool.cuts(residual.numel())] if _accumulate.direct(grad) else [0]
    indices = scratch_array("survivors", np.int32, capacity * len(starts))
    values = scratch_array("survivors", np.float32, capacity * len(starts))
    ends = [0] * len(starts)

    def work(r: F32, g: F32, u: F32 | None, swap: bool, lo: int) -> bool:
        slot = bisect_right(starts, lo) - 1
        mine = slice(slot * capacity, (slot + 1) * capacity)
        ends[slot], reached = _accumulate.accumulate_taking(
            r, g, u, swap, lo, above, indices[mine], values[mine], ends[slot]
        )
        if reached < len(r):
            rest = None if u is None else u[reached:]
            _accumulate.accumulate(r[reached:], g[reached:], rest, swap)
        return reached < len(r)

    if any(_accumulate.run(residual, grad, undo, work)):
        for slot, end in enumerate(ends):
            mine = slice(slot * capacity, slot * capacity + end)
            _accumulate.put_back(view(residual), indices[mine], values[mine])
        return None
    return _collect.joined([(end, False) for end in ends], capacity, len(indices), indices, values)


def warm() -> None:
    grad = torch.arange(-100.0, 100.0)
    for undo in (None, torch.empty(200), grad):
        residual = torch.zeros(200)
        feedback_topk(residual, grad, 10, undo)
        feedback_gaussiank(residual, grad, 10, undo)
        feedback_threshold(residual, grad, 3.0, undo)
        feedback_block(residual, grad, 150, 100, undo, None)
    for other in (torch.empty(200), grad):
        feedback_block(residual, grad, 150, 100, None, other)
    indices, _ = topk(residual, grad, 10)
    commit_feedback(residual, grad, indices)
    _accumulate.put_back(view(residual), indices.numpy(), np.zeros(10, np.float32))
