"""The means of one step, kept for the next: the exchange of a `delayed` method runs beside that step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from thinwire.core import schema
from thinwire.core.begun import Begun
from thinwire.core.routing import View
from thinwire.errors import StateError

NOTHING = -1
"""In a checkpoint: the number of the step whose means wait, if there is none."""


class Ready:
    """The means of a step that no optimizer has seen yet; those of an aborted step are not finite.

    Args:
        step: its number.
        committed: whether it was.
        means: flat, by parameter; empty if the step was aborted.
        views: those of its exchange. The means are their outputs, or a program will write them.
        program: that program; it writes them once.
    """

    def __init__(
        self,
        step: int,
        committed: bool,
        means: dict[str, torch.Tensor],
        views: Sequence[View] = (),
        program: Begun | None = None,
    ) -> None:
        self.step = step
        self.committed = committed
        self._means = means
        self._views = views
        self._program = program

    @property
    def means(self) -> dict[str, torch.Tensor]:
        """Flat, by parameter; empty if the step was aborted."""
        program, self._program = self._program, None
        if program is not None and self.committed:
            self._views = [View(view.layout, view.x, torch.empty_like(view.out)) for view in self._views]
            program.deliver(self._views)
            self._means = _by_name(self._views)
        return self._means

    def kept_for(self, views: Sequence[View]) -> list[torch.Tensor]:
        """The memory of the means for each of these views; empty if they are not in memory like that."""
        if not self.committed or self._program is not None or not self._fits(views):
            return []
        return [kept.out for kept in self._views]

    def write(self, views: Sequence[View]) -> None:
        """Write the means into the outputs of these views."""
        if not self.committed:
            for view in views:
                view.out.fill_(torch.nan)
        elif self._program is not None and self._fits(views):
            program, self._program = self._program, None
            program.deliver(views)
        else:
            means = self.means
            for view in views:
                for name, part in zip(view.layout.names, view.layout.parts(view.out), strict=True):
                    part.copy_(means[name])

    def _fits(self, views: Sequence[View]) -> bool:
        """Whether these views are of the same tensors in the same order; DDP may have made other buckets."""
        return [id(view.layout) for view in views] == [id(view.layout) for view in self._views]


class Delay:
    """What the step before has left for the present one.

    The step after t hands out the means of step t. The first step hands out zeros, and so does the first one
    after a failure. If step t was aborted, what the next step hands out is not finite, on all ranks alike.
    """

    def __init__(self, *, on: bool) -> None:
        self.on = on
        """Whether the next step hands out the means of the one before; `auto` changes it."""
        self.ready: Ready | None = None
        self.given: int | None = None
        """The step whose means were handed out last; None for zeros."""

    def keep(self, step: int, views: Sequence[View], committed: bool, program: Begun | None = None) -> None:
        """The exchange of a step has ended; these views have its means, or `program` will write them."""
        if program is not None and not committed:
            program.close()
        means = _by_name(views) if committed and program is None else {}
        self.ready = Ready(step, committed, means, views, program)

    def hand_over(self, views: Sequence[View]) -> list[torch.Tensor]:
        """The means of the step before for each of these views, without a copy where that is possible.

        The memory is that of the exchange, which holds until the step after the next one, or the views' own.
        """
        ready = self.ready
        kept = [] if ready is None else ready.kept_for(views)
        if ready is None or not kept:
            self.hand_out(views)
            return [view.out for view in views]
        self.ready, self.given = None, ready.step
        return kept

    def hand_out(self, views: Sequence[View]) -> None:
        """Write the means of the step before into the outputs of these views."""
        ready, self.ready = self.ready, None
        self.given = None if ready is None else ready.step
        if ready is not None:
            ready.write(views)
            return
        for view in views:
            view.out.zero_()

    def add(self, views: Sequence[View]) -> None:
        """Add the means of the step before to the outputs of these views: the delay ends with this step."""
        ready, self.ready = self.ready, None
        if ready is None:
            return
        for view in views:
            for slot, part in zip(view.layout.slots, view.layout.parts(view.out), strict=True):
                part.add_(ready.means[slot.name] if ready.committed else torch.nan)

    def rescale(self, factor: float) -> None:
        """The loss scale has changed by this factor: the optimizer divides by the new one."""
        for mean in () if self.ready is None else self.ready.means.values():
            mean.mul_(factor)

    def residuals(self, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """With these residuals: this rank's part of what no optimizer has seen yet."""
        means = {} if self.ready is None else self.ready.means
        waiting = {name: mean.float() for name, mean in means.items()}
        return found | {name: mean + found.get(name, 0.0) for name, mean in waiting.items()}

    # -- checkpoints -----------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        ready = self.ready or Ready(NOTHING, True, {})
        means = {name: mean.clone() for name, mean in ready.means.items()}
        return {"on": self.on, "step": ready.step, "committed": ready.committed, "means": means}

    def load(self, saved: Mapping[str, Any], device_of: Mapping[str, torch.Tensor]) -> None:
        """Replace everything by a record that was checked."""
        self.on, self.given, self.ready = saved["on"], None, None
        if saved["step"] != NOTHING:
            means = {name: mean.to(device_of[name].device).clone() for name, mean in saved["means"].items()}
            self.ready = Ready(saved["step"], saved["committed"], means)


def _by_name(views: Sequence[View]) -> dict[str, torch.Tensor]:
    """The outputs of these views, by parameter."""
    outputs: dict[str, torch.Tensor] = {}
    for view in views:
        outputs |= zip(view.layout.names, view.layout.parts(view.out), strict=True)
    return outputs


def delay_schema(like: Mapping[str, torch.Tensor]) -> schema.Check:
    """The check of `Delay.save`; `like` has a flat tensor for every parameter."""
    fields = schema.record(
        {
            "on": schema.flag(),
            "step": schema.whole(NOTHING),
            "committed": schema.flag(),
            "means": schema.tensors(like, complete=False, finite=True),
        }
    )

    def fits(given: Any, what: str) -> None:
        fields(given, what)
        expected: Iterable[str] = like if given["step"] != NOTHING and given["committed"] else ()
        if set(given["means"]) != set(expected):
            raise StateError(f"{what} has the means of {len(given['means'])} of {len(like)} parameters")

    return fits
