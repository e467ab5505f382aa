"""Times the computing of a training loop in its own steps, with hooks on model, parameters and optimizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.core.optimizers import Optimizers
from thinwire.predict.timeline import Compute


@dataclass
class Watch:
    """What a rank computes in a step, by its clock, while everything else of the step goes on beside it.

    - forward: of the model itself, without what DDP does before it;
    - backward: from there, with the loss, until the last gradient is ready. What is sent meanwhile costs
      nothing; the wait for the rest begins afterwards and is not counted. Compression in other threads takes
      processor time away from it, and that does count: it is how long computing takes beside this method;
    - rest: the optimizers' steps, without hooks that were registered after this one.
    """

    forward: list[float] = field(default_factory=list[float])
    backward: list[float] = field(default_factory=list[float])
    rest: list[float] = field(default_factory=list[float])
    stops: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    _began: float = 0.0
    _computed: float = 0.0
    _last_gradient: float = 0.0
    _stepping: float = 0.0
    _updated: float = 0.0

    def start(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Before a session that averages in hooks of the optimizers is attached."""
        inner = cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model
        # In a compiled model these would be traced, and compiled again in every step.
        before, after = (
            cast(Any, torch.compiler.disable(each)) for each in (self._before_forward, self._after_forward)
        )
        self.stops.append(inner.register_forward_pre_hook(before).remove)
        self.stops.append(inner.register_forward_hook(after).remove)
        for parameter in inner.parameters():
            if parameter.requires_grad:
                self.stops.append(cast(RemovableHandle, parameter.register_hook(self._on_gradient)).remove)
        for optimizer in optimizers:
            self.stops.append(optimizer.register_step_pre_hook(self._before_update).remove)
            self.stops.append(optimizer.register_step_post_hook(self._after_update).remove)

    def stop(self) -> None:
        for stop in self.stops:
            stop()
        self.stops.clear()

    def compute(self) -> Compute:
        """The medians so far, without the first step, which compiles and allocates."""
        self._close()
        forward, backward, rest = (
            statistics.median(times[1:]) if len(times) > 1 else 0.0
            for times in (self.forward, self.backward, self.rest)
        )
        return Compute(forward, backward, rest)

    def _close(self) -> None:
        """Record the previous step: its last gradient ended its backward pass, communication aside.

        Its optimizers have stepped one by one.
        """
        if self._last_gradient:
            self.forward.append(self._computed - self._began)
            self.backward.append(self._last_gradient - self._computed)
        self._last_gradient = 0.0
        if self._updated:
            self.rest.append(self._updated)
        self._updated = 0.0

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if module.training and torch.is_grad_enabled():
            self._close()
            self._began = time.perf_counter()

    def _after_forward(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if module.training and torch.is_grad_enabled():
            self._computed = time.perf_counter()

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def _before_update(self, optimizer: object, args: object, kwargs: object) -> None:
        self._stepping = time.perf_counter()

    def _after_update(self, optimizer: object, args: object, kwargs: object) -> None:
        self._updated += time.perf_counter() - self._stepping
