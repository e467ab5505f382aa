"""Squared gradients of all ranks, averaged after T, k T, k^2 T, ... steps.

    s_0 = (1/W) sum_i mean of g_i^2 in the first T steps
    s <- s / k + (1 - 1/k) (1/W) sum_i mean of g_i^2 since the last time

Noise that the mean of gradients averages away is in s_0 and in s alike, so s / s_0 tells how the second
moment of the mean has changed since. Roots are kept, in units of the gradient: they follow a loss scale.

An entry without a gradient in the first T steps, like those of a rare word, has no s_0 and no second moment.
It takes the largest s_0 of its tensor, and the optimizer takes the tensor's largest second moment. Together
they make a second moment of s, as soon as there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch

from thinwire import kernels
from thinwire.core import Channel, Layout, State, shared
from thinwire.methods.families.feedback import poisoned
from thinwire.methods.families.wrapped import Wrapping


@dataclass(frozen=True)
class Renewal:
    """When s is renewed: after `first` steps, and whenever there are `times` as many."""

    first: int
    times: int

    def is_due(self, step: int) -> bool:
        """Whether s is renewed after this step, counted from 0."""
        count, rest = divmod(step + 1, self.first)
        while not rest and count > 1 and count % self.times == 0:
            count //= self.times
        return not rest and count == 1

    def steps(self, step: int) -> int:
        """How many steps there have been since the renewal before this one."""
        done = step + 1
        return done if done == self.first else done - done // self.times


@dataclass
class Noted:
    """What a step makes of the squares, once it is committed: roots; `first` if `s` is s_0."""

    own: torch.Tensor
    s: torch.Tensor | None = None
    first: bool = False


def _ratio(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """1 where it has no finite value: both are 0, or gradients have become too small."""
    return (before / now).nan_to_num_(1.0, 1.0, 1.0)


@dataclass
class MeanSquares(State):
    """Roots: of this rank's sum since the last renewal, of s, and of s_0. Any rank's sum is an estimate."""

    own: torch.Tensor = shared()
    s: torch.Tensor = shared()
    s_0: torch.Tensor = shared()
    lengths: tuple[int, ...] = ()
    """Of the tensors; known from the layout, so not part of a checkpoint."""

    @classmethod
    def new(cls, layout: Layout, times: int | None) -> MeanSquares | None:
        """For renewals after `times` as many steps; None if there are none."""
        if times is None:
            return None
        roots = (torch.zeros(layout.numel, device=layout.device) for _ in range(3))
        return cls(*roots, lengths=tuple(slot.numel for slot in layout.slots))

    async def noted(self, own: torch.Tensor, renewal: Renewal, ch: Channel) -> Noted:
        """`own` has this rank's gradient in it; if it is due, average over all ranks. Nothing is kept yet."""
        if not renewal.is_due(ch.step):
            return Noted(own)
        sent = own.square().div_(renewal.steps(ch.step)).to(torch.bfloat16)
        await ch.mean(sent, sent)
        s, first = sent.to(own.dtype), ch.step + 1 == renewal.first
        if not first:
            s = torch.lerp(self.s.square(), s, 1 - 1 / renewal.times)
        return Noted(torch.zeros_like(own), s.sqrt_(), first)

    def keep(self, noted: Noted, m: torch.Tensor) -> None:
        """The step is committed. If s is new, `m`, which has gradients times `scale` in it, follows."""
        self.own = noted.own
        if noted.s is None:
            return
        if noted.first:
            self.s_0.copy_(self._without_gaps(noted.s))
        else:
            before = torch.where(self.s == 0, self.s_0, self.s)  # where there was no s, the scale was 1
            m.mul_(_ratio(before, noted.s))
        self.s.copy_(noted.s)

    def _without_gaps(self, s: torch.Tensor) -> torch.Tensor:
        parts = [part for part in cast("tuple[torch.Tensor, ...]", s.split(self.lengths)) if part.numel()]
        return torch.cat([torch.where(part == 0, part.amax(), part) for part in parts]) if parts else s


@dataclass
class WithSquares(Wrapping):
    """A state with mean squares, if the method wants them."""

    squares: MeanSquares | None = field(kw_only=True)

    @property
    def parts(self) -> tuple[State, ...]:
        return (*super().parts, *(() if self.squares is None else self.squares.parts))

    def grown(self, x: torch.Tensor) -> torch.Tensor | None:
        """This rank's root with the gradient x in it; None without mean squares. Nothing is kept yet."""
        return None if self.squares is None else torch.hypot(self.squares.own, x.float())

    def mixed(self, m: torch.Tensor, x: torch.Tensor, beta: float, out: torch.Tensor) -> torch.Tensor | None:
        """`grown(x)`; and out = beta m + (1 - beta) c x with c = sqrt(s_0 / s).

        c is 1 before the second renewal, and where there has been no gradient.
        """
        kept = self.squares
        return kernels.adam_momentum(m, x, kept and (kept.own, kept.s_0, kept.s), beta, out)

    async def noted(
        self, own: torch.Tensor | None, first: int, times: int | None, ch: Channel
    ) -> Noted | None:
        """See `MeanSquares.noted`; None without mean squares."""
        if self.squares is None or own is None or times is None:
            return None
        return await self.squares.noted(own, Renewal(first, times), ch)

    def checked(self, out: torch.Tensor, noted: Noted | None) -> torch.Tensor:
        """`out`, or NaN if a new s is not finite: it is equal on all ranks, and all then abort the step."""
        return out if noted is None or noted.s is None else poisoned(out, noted.s)

    def keep(self, noted: Noted | None, m: torch.Tensor) -> None:
        """See `MeanSquares.keep`."""
        if self.squares is not None and noted is not None:
            self.squares.keep(noted, m)

    def taken(self, out: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        """m = out. The momentum `out` that the optimizer gets is cleared where nobody has had a gradient: a
        lossy exchange may fill these entries, too."""
        kernels.adam_keep(out, self.squares and self.squares.s, m)
        return m
