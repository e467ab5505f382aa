"""Counts and times the optimizer steps of a script."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.core.optimizers import parameters_of
from thinwire.hosts.scripts import Attached


class Enough(SystemExit):
    """Leaves the script after the last step. Handlers of `Exception` do not stop it, `finally` is reached."""


class Clock:
    """Counts the training steps of the first model, and times them.

    Data loading and whatever else the script does between two steps is part of a step.

    Args:
        limit: all ranks leave the script after this many steps, where it begins the next one.
        on_step: called after every step.
    """

    def __init__(self, limit: int | None = None, on_step: Callable[[], None] | None = None) -> None:
        self._limit = limit
        self._on_step = on_step
        self.steps = 0
        self.durations: list[float] = []
        self._total = 0.0
        self._last = 0.0
        self._own: set[int] = set()
        self._counted: set[int] = set()  # a training step is complete when these have stepped
        self._stepped: set[int] = set()
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def attached(self, one: Attached) -> None:
        """A model is about to take its first step."""
        if not self._own:
            self._own = {id(parameter) for parameter in one.model.parameters()}
            self._counted = set(map(id, one.optimizers))
            self._last = time.perf_counter()
            if self._limit is not None:
                leave = cast(Any, torch.compiler.disable(self._leave))
                one.model.register_forward_pre_hook(leave, prepend=True)

    @property
    def running(self) -> float:
        """Seconds since the first training forward pass."""
        return self.seconds + (time.perf_counter() - self._last if self._last else 0.0)

    @property
    def seconds(self) -> float:
        """Until the last step."""
        return self._total

    @property
    def step_seconds(self) -> float:
        """The median."""
        return statistics.median(self.durations) if self.durations else 0.0

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._counted and self._own & set(map(id, parameters_of(optimizer))):
            self._counted = {id(optimizer)}
        if id(optimizer) not in self._counted:
            return
        if id(optimizer) in self._stepped:  # the script steps another one less often, or not yet
            self._complete()
        self._stepped.add(id(optimizer))
        if self._stepped == self._counted:
            self._complete()

    def _complete(self) -> None:
        self._stepped.clear()
        now = time.perf_counter()
        self.durations.append(now - self._last)
        self._total += self.durations[-1]
        self._last = now
        self.steps += 1
        if self._on_step is not None:
            self._on_step()

    def _leave(self, model: nn.Module, inputs: object) -> None:
        """Not right after the step: the script may have something to say of it, or to test."""
        if (
            self._limit is not None
            and self.steps >= self._limit
            and model.training
            and torch.is_grad_enabled()
        ):
            raise Enough(0)

    def close(self) -> None:
        self._handle.remove()
