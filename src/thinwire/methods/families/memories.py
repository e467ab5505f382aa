"""Error feedback: what is not sent comes back later, and a failed step leaves no trace."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import torch

from thinwire import kernels
from thinwire.core.exchange import State, residual
from thinwire.core.layout import Layout
from thinwire.methods.families.selectors import Picked, Selector


@dataclass
class Residual(State):
    """The state of every method with plain error feedback; empty when feedback is off."""

    error: torch.Tensor = residual()

    @staticmethod
    def for_layout(layout: Layout, wanted: bool = True) -> Residual:
        return Residual(torch.zeros(layout.numel if wanted else 0, device=layout.device))


class _Undone:
    """A run that ends without having been settled, by an exception, is undone."""

    _open: bool

    @abstractmethod
    def close(self, keep: bool) -> object: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._open:
            self.close(False)


class SparseMemory(_Undone):
    """Takes entries out of error + gradient during one run.

    Where `out` can hold it, the old error is parked there while the run lasts: nothing as large as the
    gradient is allocated, and a step that must not count is undone to the last bit, also when an
    exception ends it.
    """

    def __init__(self, error: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        self._error = error
        self._x = x
        self._out = out
        self._off = not error.numel()
        self._parked = not self._off and x.dtype == out.dtype == error.dtype
        self._open = False
        self.indices: torch.Tensor | None = None

    def take(self, selector: Selector, k: int) -> Picked:
        if self._off:
            return selector.pick(self._x, k)
        self._open = True
        if self._parked:
            picked = selector.take(self._error, self._x, k, self._out)
        else:
            picked = selector.peek(self._error, self._x, k)
        self.indices = picked[0]
        return picked

    def close(self, keep: bool, unsent: torch.Tensor | None = None) -> None:
        """Keep the step (with what the wire could not carry of the picked values) or undo it."""
        if self._off or self.indices is None:
            return
        self._open = False
        if self._parked:
            if not keep:
                self._error.copy_(self._out)
        elif keep:
            kernels.commit_feedback(self._error, self._x, self.indices)
        if keep and unsent is not None:
            self._error[self.indices.long()] += unsent


class DenseMemory(_Undone):
    """error + gradient as one tensor during one run, for methods that code every entry.

    Like `SparseMemory`, it parks the old error in `out` where it can; `total` is then the error itself.
    """

    def __init__(self, error: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        self._error = error
        self._out = out
        self._off = not error.numel()
        self._parked = not self._off and x.dtype == out.dtype == error.dtype
        self._open = self._parked
        if self._off:
            self.total = x
        elif self._parked:
            kernels.feedback_block(error, x, 0, 0, out)
            self.total = error
        else:
            self.total = error + x

    def close(self, keep: bool) -> torch.Tensor | None:
        """Keep the step or undo it. If kept, returns the error: subtract from it what was sent."""
        if self._off:
            return None
        self._open = False
        if not keep:
            if self._parked:
                self._error.copy_(self._out)
            return None
        if not self._parked:
            self._error.copy_(self.total)
        return self._error
