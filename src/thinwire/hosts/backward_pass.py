"""The end of a backward pass over a model, where all gradients are final."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class BackwardPass:
    """Calls `ends` after each backward pass, and `begins` before.

    The end is asked for where the pass begins, at the outputs of the model: a reentrant checkpoint runs
    smaller passes inside of it. A pass that fails has no end; the next one begins anew.
    """

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins = begins
        self._ends = ends
        self._task: int | None = None

    def watch(self, model: nn.Module) -> Any:
        """Watch the outputs of this model; returns a handle, whose `remove()` ends that."""
        return model.register_forward_hook(self._watch_outputs)

    def ensure_begun(self) -> None:
        """For gradients that come before any output's: the loss was computed from inside of the model."""
        if self._task is None:
            self._begin(None)

    def _watch_outputs(self, module: nn.Module, inputs: object, output: object) -> None:
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._begin)

    def _begin(self, gradient: object) -> None:
        task = cast(int, cast(Any, torch)._C._current_graph_task_id())
        if task != self._task:
            self._task = task
            self._begins()
            cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._task = None
        self._ends()
