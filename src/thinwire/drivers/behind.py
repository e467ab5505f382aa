"""Runs the exchange of a delayed step beside the next step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from thinwire.core.begun import Begun
from thinwire.core.channel import Program
from thinwire.core.delay import Delay, Ready
from thinwire.core.engine import Engine
from thinwire.core.routing import View
from thinwire.drivers.lanes import Job, Lanes, Step
from thinwire.drivers.waiting import Waiting
from thinwire.errors import ThinwireError
from thinwire.net.executor import ProcessGroupExecutor


class Delivered(Protocol):
    """Called with the means, one tensor for each view, or with the error in their place.

    Without means they are in the outputs of the views. A mean may be memory of the exchange, which holds
    until the step after the next one.
    """

    def __call__(self, error: BaseException | None, means: Sequence[torch.Tensor] = ()) -> None: ...


@dataclass
class _Turn:
    """A step that is to be exchanged."""

    views: Sequence[View]
    copies: list[View]
    """On CUDA; a CPU's are made when the exchange begins, if it needs any."""
    delivered: Delivered
    late: bool
    """Whether it gets the means of the step before; otherwise it waits for its own, and gets the sum."""
    copied: Any
    """On CUDA, the event after which the copies are there."""
    vote: Job | None
    before: Ready | None = None


def overlapping(executors: Sequence[ProcessGroupExecutor]) -> Lanes:
    """Lanes for exchanges that may outlast the training loop; the last one is then dropped."""
    lanes = Lanes(executors, overlap=True, outlast_steps=True)
    lanes.quiet_exit = True
    return lanes


class Behind:
    """At most one exchange is under way. A step that comes earlier waits for the one before.

    The means of step t-1 are delivered when its exchange has ended; only then does the exchange of step t
    begin. So residuals, step count and loss scale change as they do without a delay.
    """

    def __init__(self, engine: Engine, lanes: Lanes, *, adaptive: bool) -> None:
        if engine.delay is None:
            raise ThinwireError(f"{engine.method} has no delay")
        self._engine = engine
        self._delay: Delay = engine.delay
        self.lanes = lanes
        self._changed = threading.Condition()
        self._busy = False
        self._next: _Turn | None = None
        self._error: BaseException | None = None
        self._buffers: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = ({}, {})
        self._in_use = False  # whether the first buffers hold the means of the last exchange
        self.waiting = Waiting(engine) if adaptive else None
        """What decides about the delay, if it is adaptive."""

    def exchange(self, views: Sequence[View], delivered: Delivered) -> None:
        """Begin the exchange of these gradients, and deliver the means of the step before in their place.

        In the first step without delay the sum of both is delivered.
        """
        device = views[0].x.device
        copies = [] if device.type == "cpu" else self._copies(views)
        vote = None if self.waiting is None else self.waiting.vote()
        turn = _Turn(views, copies, delivered, self._delay.on, _event(device), vote)
        with self._changed:
            if self._busy:
                self._next = turn
                return
            self._busy = True
        self._confirm(views)
        self._begin(turn)

    def _confirm(self, views: Sequence[View]) -> None:
        """Wait until all ranks know that they are at the same step: before anything is handed out or kept.

        Runs in the training loop's thread. Behind an exchange under way there is nothing to confirm.
        """
        program = None if self._error is not None else self._engine.confirmation(views)
        if program is None:
            return
        done = threading.Event()

        def told(error: BaseException | None) -> None:
            self._error = error
            done.set()

        self._submit(Job(program, Step(lambda committed: None), told, views[0].x.device))
        done.wait()

    def is_due(self) -> bool:
        """At the begin of a step: whether its gradients go to `exchange`."""
        if self.waiting is None:
            return True
        due = self._delay.on
        self._delay.on = self.waiting.begin_step(due)
        return due or self._delay.on

    def average(self, views: Sequence[View]) -> None:
        """A step of a caller that waits for the delivery."""
        done, errors = threading.Event(), list[BaseException]()

        def delivered(error: BaseException | None, means: Sequence[torch.Tensor] = ()) -> None:
            if error is not None:
                errors.append(error)
            for view, mean in zip(views if means else (), means, strict=True):
                if mean is not view.out:
                    view.out.copy_(mean)
            done.set()

        if self.is_due():
            self.exchange(views, delivered)
        else:
            self._engine.begin_step()
            begin, step = time.perf_counter(), Step(self._engine.end_step)
            self._submit(Job(self._engine.program(views), step, delivered, views[0].x.device))
            done.wait()
            if self.waiting is not None:
                self.waiting.waited(begin, time.perf_counter())
            self.without_delay()
        done.wait()
        if errors:
            raise errors[0]

    def without_delay(self) -> None:
        """All gradients of a step that does not go to `exchange` have been submitted."""
        vote = None if self.waiting is None else self.waiting.vote()
        if vote is not None:
            self._submit(vote)

    @property
    def under_way(self) -> bool:
        """Whether an exchange has not ended yet."""
        return self._busy

    def wait(self, *, quiet: bool = False) -> None:
        """Until no exchange is under way. Raises the error that ended the last one, unless `quiet`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
            error = self._error
        if self.waiting is not None:
            self.waiting.wait()
        if error is not None and not quiet:
            raise error

    def forget(self) -> None:
        """A checkpoint is being loaded: what was measured before does not count."""
        if self.waiting is not None:
            self.waiting.forget()

    def close(self) -> None:
        """Let the exchange under way end, and the threads with it."""
        self.wait(quiet=True)
        self.lanes.close()

    def _copies(self, views: Sequence[View]) -> list[View]:
        """The gradients, out of the way of the means."""
        rooms = self._rooms(views)
        self._in_use = True
        return [View(v.layout, room.copy_(v.x), room) for v, room in zip(views, rooms, strict=True)]

    def _rooms(self, views: Sequence[View]) -> list[torch.Tensor]:
        """Memory as large as these views, and free. There are two sets: one may hold means for this step."""
        if self._in_use:
            self._buffers = (self._buffers[1], self._buffers[0])
            self._in_use = False
        memory, rooms = self._buffers[0], list[torch.Tensor]()
        for number, view in enumerate(views):
            known = memory.get(number)
            if known is None or known.shape != view.x.shape or known.dtype != view.x.dtype:
                known = memory[number] = torch.empty_like(view.x)
            rooms.append(known)
        return rooms

    def _program(self, turn: _Turn) -> tuple[Program, Begun | None]:
        """The exchange of a step; the second one if it has read the gradients, so that no copy is needed."""
        engine = self._engine
        if not turn.late or not engine.reads_early(turn.views):
            return engine.behind(turn.copies or self._copies(turn.views)), None
        rooms = self._rooms(turn.views)
        turn.copies = [View(v.layout, v.x, room) for v, room in zip(turn.views, rooms, strict=True)]
        begun = engine.begun(turn.copies)
        return begun, begun

    def _begin(self, turn: _Turn) -> None:
        """Runs in the training loop's thread, or in the lane's if the exchange before took too long."""
        device = turn.views[0].x.device
        if turn.copied is not None:
            torch.cuda.current_stream(device).wait_event(turn.copied)
        error, means = self._error, list[torch.Tensor]()
        if error is None:
            try:
                self._engine.begin_step()
                number, (program, begun) = self._engine.step, self._program(turn)
                if turn.late:
                    means = self._delay.hand_over(turn.views)
                else:
                    turn.before, self._delay.ready = self._delay.ready, None
                if turn.vote is not None:
                    self._submit(turn.vote)
                begin, step = time.perf_counter(), Step(self._engine.end_step)

                def ended(failed: BaseException | None) -> None:
                    if begun is not None and failed is None:
                        self._delay.keep(number, turn.copies, step.committed, begun)
                    self._ended(turn, failed, begin)

                self._submit(Job(program, step, ended, device))
            except BaseException as raised:  # the training loop hears of it, whatever it is
                error = raised
        if turn.late:
            turn.delivered(error, means)
        if error is not None:
            self._ended(turn, error, time.perf_counter())

    def _submit(self, job: Job) -> None:
        self.lanes.submit(0, job)
        job.step.close()

    def _ended(self, turn: _Turn, error: BaseException | None, begin: float) -> None:
        if not turn.late and error is None:
            self._delay.hand_out(turn.views)
            self._delay.ready = turn.before
            self._delay.add(turn.views)
        if self.waiting is not None:
            self.waiting.took(begin, time.perf_counter())
        with self._changed:
            self._error = self._error or error
            following, self._next = self._next, None
            if following is None:
                self._busy = False
                self._changed.notify_all()
        if not turn.late:
            turn.delivered(error)
        if following is not None:
            self._begin(following)


def _event(device: torch.device) -> Any:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
