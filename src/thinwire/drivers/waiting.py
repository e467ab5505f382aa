"""Whether a delay pays, from how long the ranks wait: the same answer on all of them, at the same step."""

from __future__ import annotations

import threading
import time
from typing import cast

import torch

from thinwire import log
from thinwire.core.channel import ask
from thinwire.core.engine import Engine
from thinwire.drivers.lanes import Job, Step
from thinwire.net import frames

EVERY = 32
"""Steps between two decisions."""
BEGIN = 0.1
"""The delay begins when waiting takes more than this part of a step."""
END = 0.05
"""It ends when the exchange takes less than this part of a step."""
FASTER = 0.5
"""Or less than this part of what it took when the delay began."""


class Waiting:
    """Measures the steps of this rank; now and then the ranks average what they measured, and decide.

    The average is taken beside the training. It is known on all ranks before the step after the next begins,
    and changes that one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = 0
        self._on = False
        self._began = 0.0
        self._waited = self._took = 0.0
        self._window = time.perf_counter()
        self._vote: tuple[int, torch.Tensor, threading.Event] | None = None

    def begin_step(self, on: bool) -> bool:
        """Whether this step is delayed; `on` if the last one was."""
        self._on = on
        vote = self._vote
        if vote is not None and self._steps == vote[0] + 2:
            self._vote = None
            vote[2].wait()
            self._on = self._decide(*cast("list[float]", vote[1].tolist()))
        self._steps += 1
        return self._on

    def waited(self, begin: float, end: float) -> None:
        """The training has waited for an exchange without delay."""
        self._waited += max(0.0, end - begin)

    def took(self, begin: float, end: float) -> None:
        """An exchange with delay has ended."""
        self._took += end - begin

    def vote(self) -> Job | None:
        """At the end of a step, if it is time: the job that averages what the ranks have measured."""
        if self._steps % EVERY:
            return None
        now = time.perf_counter()
        mine = [self._waited, self._took, now - self._window]
        self._waited = self._took = 0.0
        self._window = now
        device = next(iter(self._engine.parameters.values())).device
        sums = torch.tensor(mine, device=device) / (EVERY * self._engine.rank_info.size)
        done, step = threading.Event(), Step(lambda committed: None)
        self._vote = (self._steps - 1, sums, done)
        return Job(_mean(sums), step, lambda error: done.set(), device)

    def wait(self) -> None:
        """Until no average is under way."""
        if self._vote is not None:
            self._vote[2].wait()

    def forget(self) -> None:
        """A checkpoint has been loaded: what was measured before does not count."""
        self._vote = None
        self._waited = self._took = 0.0

    def _decide(self, waited: float, took: float, step: float) -> bool:
        """The numbers are means over ranks and steps, equal on all ranks."""
        if not self._on:
            delayed = waited > BEGIN * step
            self._began = 0.0
        else:
            self._began = self._began or took
            delayed = took >= END * step and took >= FASTER * self._began
        if delayed != self._on and self._engine.speaks:
            log.info(
                "%s: %s from step %d on: the ranks wait %.1f ms of a step of %.1f ms",
                self._engine.method,
                "one step of delay" if delayed else "no delay",
                self._steps,
                1e3 * (took if self._on else waited),
                1e3 * step,
            )
        return delayed


async def _mean(sums: torch.Tensor) -> None:
    await ask(frames.AllReduce(sums, 0))
