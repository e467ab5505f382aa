"""Error feedback: what a step does not send stays in the residual and is added to the next gradient.

A memory is u = g + e during one run. `commit` makes the part that was not sent the new residual. A memory
that is left without `commit`, after an exception or an aborted step, restores the old residual bit for bit.

If `out` can hold it, the old residual is stored there during the run, which saves an allocation as large as
the gradient. So `out` may be written only after the memory has been left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from thinwire import kernels
from thinwire.core import Layout, State, residual
from thinwire.kernels.scatter import ascending_flag


@dataclass
class Residual(State):
    """The state of every method with plain error feedback; empty if feedback is off."""

    error: torch.Tensor = residual()

    @staticmethod
    def for_layout(layout: Layout, wanted: bool = True) -> Residual:
        return Residual(torch.zeros(layout.numel if wanted else 0, device=layout.device))


class Entries(NamedTuple):
    """Some entries of a tensor: ascending int32 indices and float32 values."""

    indices: torch.Tensor
    values: torch.Tensor


class Selector(NamedTuple):
    """A rule that selects entries by their size, as kernels. `limit` is a count or a threshold.

    Non-finite entries are always selected.
    """

    of: Callable[[torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]
    """(x, limit): selects from x."""
    of_sum: Callable[[torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]
    """(error, x, limit): selects from error + x and writes nothing."""
    take: Callable[[torch.Tensor, torch.Tensor, Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """(error, x, limit, undo): error += x, selects from it and zeroes the selection; `undo` = old error."""


class _Memory:
    def __init__(self, error: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        self._error = error
        self._x = x
        self._out = out
        self._off = not error.numel()
        self._fits = not self._off and x.dtype == out.dtype == error.dtype
        self._old_error_in_out = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._old_error_in_out:
            self._error.copy_(self._out)


class SparseMemory(_Memory):
    """u = g + e, for methods that send some entries of u."""

    def take(self, selector: Selector, limit: float | kernels.PerChunk) -> Entries:
        """c: the selected entries of u."""
        if self._off:
            return Entries(*selector.of(self._x, limit))
        if self._fits:
            taken = Entries(*selector.take(self._error, self._x, limit, self._out))
            self._old_error_in_out = True
        else:
            taken = Entries(*selector.of_sum(self._error, self._x, limit))
        self._indices = taken.indices
        return taken

    def take_at(self, indices: torch.Tensor) -> Entries:
        """c: u at these indices. The indices must not depend on u."""
        values = at(self._x, indices).float()
        if not self._off:
            values = at(self._error, indices) + values
        self._indices = indices
        return Entries(indices, poisoned(values, self._x))

    def commit(
        self, lost: Sequence[tuple[torch.Tensor | slice, torch.Tensor]] = (), decay: float = 1.0
    ) -> None:
        """e = u - c, plus what the codes of c have lost, and where; then times `decay`."""
        if self._off:
            return
        if not self._old_error_in_out:
            kernels.commit_feedback(self._error, self._x, self._indices)
        self._old_error_in_out = False
        for where, amount in lost:
            self._error[where] += amount
        if decay != 1:
            self._error.mul_(decay)


class DenseMemory(_Memory):
    """u = g + e as one tensor, for methods that code every entry."""

    def __init__(self, error: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        super().__init__(error, x, out)
        if self._fits:
            kernels.feedback_block(error, x, 0, 0, out)
            self._old_error_in_out = True
        self.u = x if self._off else error if self._fits else error + x

    def commit(self) -> torch.Tensor:
        """e = u. The caller subtracts what was sent from the returned residual (empty if feedback is off)."""
        if not self._off and not self._fits:
            self._error.copy_(self.u)
        self._old_error_in_out = False
        return self._error


def at(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """x[indices]. Other devices than a CPU may have -1 there, for an invalid index from the wire."""
    return x.index_select(0, indices) if x.device.type == "cpu" else x[indices.long()]


def poisoned(values: torch.Tensor, x: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
    """The values, or NaN if any entry of x is not finite: that entry may not be among those sent.

    On other devices than a CPU also if these indices, which came from the wire, do not ascend within x: all
    ranks then abort the step.
    """
    if x.device.type == "cpu":
        return values if kernels.all_finite(x) else values.fill_(torch.nan)
    valid = True if indices is None else ascending_flag(indices, x.numel())
    return torch.where(x.isfinite().all() & valid, values, torch.nan)
