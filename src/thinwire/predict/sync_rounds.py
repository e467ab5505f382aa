"""Plays one worker's sync rounds of a periodic method, with made-up changes of the parameters."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from thinwire.averaging.base import Schedule
from thinwire.averaging.fragments import pieces_of
from thinwire.core.channel import Program
from thinwire.errors import ConfigError, PayloadError
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo
from thinwire.predict.buckets import Shapes
from thinwire.predict.mirror import (
    Blocks,
    ElsewhereError,
    Mirror,
    Recorded,
    UnknownBlockError,
    grown,
)
from thinwire.predict.player import LARGEST_MODEL, SAMPLE, joins_tensors, noise, one_thread_if_busy
from thinwire.predict.timeline import Sync
from thinwire.sessions.periodic import PeriodicSession
from thinwire.sessions.preparation import prepare_for

# After this many seconds no further sync round is measured.
LONG_ENOUGH = 0.1
LARGE_GROUP = 1024


class Played(NamedTuple):
    """The sync rounds of a cycle, one for each fragment, and how far their work varied."""

    syncs: tuple[Sync, ...]
    data_dependent: bool
    spread: float


def play_cycle(
    schedule: Schedule,
    shapes: Shapes,
    workers: int,
    *,
    dense_below: int,
    repeats: int,
    link: Link | None = None,
    most: int | None = None,
    grow_work: bool = True,
) -> Played:
    """Play cycles among so many workers on this link; the shortest sync round of each fragment counts.

    Without repeats one cycle is played. Of a large model the first layers are played, those with `most`
    entries, and every sync round is scaled by the number of entries of its fragment. Without `grow_work` the
    work is that of these layers.
    """
    entries = sum(math.prod(shape) for shape in shapes.values())
    if entries > LARGEST_MODEL:
        raise ConfigError(
            f"a model of {entries:,} parameters is too large to predict (at most {LARGEST_MODEL:,}): "
            "take a part of its layers, and scale compute time and result"
        )
    fragments = schedule.fragment_count
    layers = _first_layers(shapes, most or SAMPLE, fragments)
    factors = _growth(schedule, layers, list(shapes.values()))
    played = replace(schedule, warmup=0)

    def worker(rank: int) -> _Worker:
        return _Worker(played, layers, RankInfo(rank, workers), dense_below, link, factors)

    with one_thread_if_busy():
        cycles, operations, dependent = _as_leader(worker, workers, repeats)
    best = [min(turns, key=lambda sync: sync.work) for turns in zip(*cycles, strict=True)]
    totals = [sum(sync.work for sync in cycle) for cycle in cycles]
    spread = statistics.median(totals) / min(totals) if min(totals) > 0 else 1.0
    syncs = tuple(
        Sync(grown(sync.job, seen, factor, work=grow_work), factor * sync.before, factor * sync.after)
        for sync, seen, factor in zip(best, operations, factors, strict=False)
    )
    return Played(syncs * (fragments // len(syncs)), dependent, spread)


def _growth(
    schedule: Schedule, layers: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...]]
) -> list[float]:
    """How many times as many entries each fragment of the model has as that of these layers."""

    def sizes(of: Sequence[tuple[int, ...]]) -> list[int]:
        tensors = {str(number): torch.empty(shape, device="meta") for number, shape in enumerate(of)}
        lists = pieces_of(tensors, schedule.fragment_count, whole_tensors=schedule.whole_tensors)
        return [sum(piece.stop - piece.start for piece in pieces) for pieces in lists]

    return [all_of / max(1, some) for all_of, some in zip(sizes(shapes), sizes(layers), strict=True)]


def _first_layers(shapes: Shapes, most: int, least: int) -> list[tuple[int, ...]]:
    """Layers until there are enough entries, and one for each fragment."""
    found: list[tuple[int, ...]] = []
    for shape in shapes.values():
        if most <= 0 and len(found) >= least:
            break
        found.append(tuple(shape))
        most -= math.prod(shape)
    return found


class _Model(nn.Module):
    def __init__(self, layers: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        for number, shape in enumerate(layers):
            values = noise(math.prod(shape)).view(shape).clone()
            self.register_parameter(f"layer{number}", nn.Parameter(values))

    @torch.no_grad()
    def move(self, turn: int) -> None:
        """As if it had been trained: all entries change."""
        for parameter in self.parameters():
            flat = parameter.view(-1)
            flat.add_(noise(flat.numel()).roll(turn), alpha=1e-3)


class _NoOptimizer(torch.optim.Optimizer):
    """Holds the parameters, and never steps.

    torch's own `add_param_group` imports its compiler first, which takes longer than to play all sync rounds.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append({**self.defaults, **param_group})


class _Worker:
    """One rank's replica and session."""

    def __init__(
        self,
        schedule: Schedule,
        layers: Sequence[tuple[int, ...]],
        rank_info: RankInfo,
        dense_below: int,
        link: Link | None,
        factors: Sequence[float],
    ) -> None:
        self.model = _Model(layers)
        optimizer = _NoOptimizer(self.model.parameters())
        self.session = PeriodicSession(
            self.model, schedule, optimizer, rank_info=rank_info, dense_below=dense_below, link=link
        )
        self.session.engine.cuts = False  # pieces take as long as their bytes
        prepare_for(self.session.engine.exchanges, loud=False)
        # Of a part of its tensors an exchange decides as it would for all, if bytes take longer.
        joins = joins_tensors(self.session.engine.exchanges)
        self._links = [self.session.engine.link.slower(each if joins else 1.0) for each in factors]
        # Fragments of equally many coordinates are alike: one is played.
        self.count = schedule.fragment_count if schedule.whole_tensors else 1
        self._next: tuple[Program, float] | None = None
        self.model.move(0)

    def cycle(self, mirror: Mirror, number: int) -> list[Sync]:
        """All fragments once, or one of them if they are alike."""
        return [self.turn(mirror, number * self.count + turn) for turn in range(self.count)]

    def turn(self, mirror: Mirror, number: int) -> Sync:
        """Steps until the next sync round, that one, and those until its result has been applied.

        If the next one begins in the step that applies this result, the time of both counts for the next.
        """
        program, before = self._next or self._advance()
        while program is None:
            program, before = self._advance()
        self._next = None
        self.session.engine.link = self._links[number % self.count]
        job = mirror.run(program, number)
        if (number + 1) % self.count == 0:  # before the next cycle begins
            self.model.move(number + 1)
        after = 0.0
        while self.session.under_way and self._next is None:
            program, seconds = self._advance()
            if program is None:
                after = max(after, seconds)
            else:
                self._next = program, seconds
        return Sync(job, before, after)

    def close(self) -> None:
        """The sync round that has begun last is not played."""
        if self._next is not None:
            self._next[0].close()

    def _advance(self) -> tuple[Program | None, float]:
        began = time.perf_counter()
        program = self.session.advance()
        return program, time.perf_counter() - began


def _as_leader(
    worker_of: Callable[[int], _Worker], workers: int, repeats: int
) -> tuple[list[list[Sync]], list[list[Recorded]], bool]:
    """Play cycles of rank 0, or of the one whose broadcast the others wait for; see `Player`.

    Returns the cycles, and the operations of the last one.
    """
    rank, sent = 0, Blocks()
    for _ in range(4):
        worker = worker_of(rank)
        mirror = Mirror(RankInfo(rank, workers), sent)
        try:
            began = time.perf_counter()
            cycles = [worker.cycle(mirror, 0)]
            # Among thousands of workers one cycle takes long, and states and workspaces hardly any of it.
            least = 1 if workers > LARGE_GROUP else 2
            while len(cycles) <= repeats and (
                len(cycles) < least or time.perf_counter() - began < LONG_ENOUGH
            ):
                cycles.append(worker.cycle(mirror, len(cycles)))
        except ElsewhereError as elsewhere:
            rank = elsewhere.src
        except UnknownBlockError as unknown:
            other = worker_of(unknown.src)
            with contextlib.suppress(ElsewhereError, UnknownBlockError):
                other.cycle(Mirror(RankInfo(unknown.src, workers), sent), 0)
            other.close()
        except PayloadError:
            if rank:
                raise
            rank, sent = workers - 1, Blocks()
        else:
            dependent = worker.session.payload_bytes() is None
            last = range((len(cycles) - 1) * worker.count, len(cycles) * worker.count)
            return cycles[1:] or cycles, [mirror.operations[number] for number in last], dependent
        finally:
            worker.close()
    raise AssertionError(f"{worker_of(0).session.method}: every rank waits for what another one sends")
