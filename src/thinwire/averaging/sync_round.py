"""One sync round: the coroutine that averages, and what is done with the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from thinwire.averaging.base import Outer
from thinwire.averaging.fragments import Block, Fragment, Piece
from thinwire.averaging.spares import Spares
from thinwire.core.agreement import signed
from thinwire.core.channel import Channel, mark_of, together
from thinwire.core.optimizers import Optimizers
from thinwire.core.routing import View
from thinwire.core.schema import is_finite
from thinwire.errors import DisagreementError
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo

# First the ranks compare the step, the number of the round, the fragments, a mark of the rest and a digest.
NOTE_BYTES = 5 * 8
_MARK = mark_of("thinwire sync round")


@dataclass
class SyncRound:
    """The fragments and dense tensors of a sync round, and its results.

    `changes` first hold `anchor - params`, then their mean. `begun` holds this rank's parameters at the
    beginning, if the result is applied later. `dense` first holds copies of buffers and of the optimizer's
    state, then their mean.
    """

    step: int
    number: int
    numbers: list[int]
    fragments: list[Fragment]
    targets: dict[str, torch.Tensor]
    due: int
    synced: int = 0
    """The step after which the replicas were equal, if this sync round fails."""
    digest: int = 0
    """Of what is equal on all ranks; 0 in a sync round that does not compare it."""
    spares: Spares = field(default_factory=Spares)
    """The memory for changes, from and for other sync rounds."""
    changes: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    begun: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    dense: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    @property
    def late(self) -> bool:
        """Whether the result is applied some steps after the sync round began."""
        return self.due > self.step

    def apply(self, outer: Outer) -> None:
        """Take the outer step with the means."""
        for position, (block, mean) in enumerate(self.results()):
            if self.late:
                block.apply_late(mean, outer, self.begun[position])
            else:
                block.apply(mean, outer)

    @property
    def blocks(self) -> list[Block]:
        return [block for fragment in self.fragments for block in fragment.blocks]

    def snapshot(self) -> None:
        """Copy the tensors to send: the next step may begin before they are sent."""
        both = [block.change(self.spares, keep=self.late) for block in self.blocks]
        self.changes = [change for change, _ in both]
        self.begun = [own for _, own in both if own is not None]
        self.dense = [target.detach().clone().contiguous().view(-1) for target in self.targets.values()]

    def release(self) -> None:
        """The results have been applied or refused: their memory is free."""
        for flat in (*self.changes, *self.begun):
            self.spares.give_back(flat)
        self.changes, self.begun = [], []

    @property
    def views(self) -> list[View]:
        return [View(block.exchanged, flat, flat) for block, flat in self.results()]

    @property
    def finite(self) -> bool:
        """Computed from means, which are equal on all ranks, so all ranks agree."""
        if all(flat.device.type == "cpu" for flat in self.changes):
            return all(is_finite(flat) for flat in self.changes)
        return bool(torch.stack([flat.isfinite().all() for flat in self.changes]).all())  # one wait for all

    def results(self) -> list[tuple[Block, torch.Tensor]]:
        return list(zip(self.blocks, self.changes, strict=True))

    def begun_with(self) -> list[tuple[Block, torch.Tensor]]:
        """This rank's parameters at the beginning; none if the result is applied at once."""
        return list(zip(self.blocks, self.begun, strict=True)) if self.late else []

    def apply_dense(self) -> None:
        """Apply the finite means."""
        for target, mean in zip(self.targets.values(), self.dense, strict=True):
            copy_if_finite(mean, target)

    async def prepare(self, rank_info: RankInfo, link: Link, device: torch.device) -> None:
        """Check that all ranks synchronise the same tensors, then average the dense ones."""
        ch = Channel(rank_info, step=0, seed=0, key="", device=device, link=link)
        await together([self._compare(ch, device)], rank_info, step=0, mark=_MARK, link=link)
        tasks = [mean_in_place(tensor, ch) for tensor in self.dense if tensor.numel()]
        if tasks:
            await together(tasks, rank_info, step=self.number, mark=_MARK, link=link)

    async def _compare(self, ch: Channel, device: torch.device) -> None:
        described = [f"{name} {tuple(target.shape)} {target.dtype}" for name, target in self.targets.items()]
        which = mark_of(repr(self.numbers))
        numbers = [self.step, self.number, which, mark_of("\n".join(described)), signed(self.digest)]
        mine = torch.tensor(numbers, device=device)
        notes = torch.stack([note for (note,) in await ch.gather([mine])])
        gathered = cast("list[list[int]]", notes.tolist())
        for position, problem in enumerate(_PROBLEMS):
            values = [note[position] for note in gathered]
            if any(value != values[0] for value in values):
                listing = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise DisagreementError(problem.format(listing))


_PROBLEMS = (
    "the ranks synchronise after different numbers of optimizer steps ({}). All must take the same number: "
    "give each rank as many batches, and pass a GradScaler, which skips steps on single ranks, to "
    "attach(scaler=...). After a restart, load the same generation of the checkpoint on every rank",
    "the ranks are at different sync rounds ({}): load the same checkpoint on every rank",
    "one rank called sync() while another synchronised as planned (marks: {}): call it on every rank after "
    "the same step",
    "the ranks' optimizers or buffers hold different tensors (marks: {}): with momentum='average' every "
    "parameter must have had a gradient on every rank, or on none",
    "the ranks' last common models, or other state that is equal on all ranks, differ (digests: {}): load "
    "checkpoints of one run and one step on every rank, or on none",
)


def copy_if_finite(mean: torch.Tensor, target: torch.Tensor) -> None:
    """Where a mean is not finite, which is so on all ranks, every rank keeps its own numbers."""
    found = mean.view(target.shape)
    if mean.device.type != "cpu":
        target.copy_(torch.where(found.isfinite().all(), found, target))
    elif is_finite(mean):
        target.copy_(found)


async def mean_in_place(flat: torch.Tensor, ch: Channel) -> None:
    await ch.mean(flat, flat)


def remembered(optimizers: Optimizers, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
    """The momenta and second moments of these pieces, by name, in the same order on all ranks."""
    return {
        f"{piece.key}\n{entry}": piece.of(value)
        for piece in pieces
        for entry, value in optimizers.remembered(piece.parameter).items()
    }
