"""Plays one worker's sync round of a periodic method, with made-up changes of the parameters."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from thinwire.averaging.base import Schedule
from thinwire.core.channel import Program
from thinwire.errors import ConfigError, PayloadError
from thinwire.net.rank_info import RankInfo
from thinwire.predict.buckets import Shapes
from thinwire.predict.mirror import (
    Blocks,
    ElsewhereError,
    Job,
    Mirror,
    Recorded,
    UnknownBlockError,
    grown,
)
from thinwire.predict.player import LARGEST_MODEL, SAMPLE, noise, one_thread_if_busy
from thinwire.sessions.periodic import PeriodicSession
from thinwire.sessions.preparation import prepare_for

# After this many seconds no further sync round is measured.
LONG_ENOUGH = 0.3
LARGE_GROUP = 1024


class Played(NamedTuple):
    """A sync round: its job, the work before it and after it, and how far the work varied."""

    job: Job
    before: float
    after: float
    data_dependent: bool
    spread: float


def play_sync_round(
    schedule: Schedule,
    shapes: Shapes,
    workers: int,
    *,
    dense_below: int,
    repeats: int,
    most: int | None = None,
    grow_work: bool = True,
) -> Played:
    """Play sync rounds of one fragment among so many workers; the shortest counts.

    Without repeats one is played. Of a large model the first layers are played, and all is scaled by the
    number of entries: those with `most` entries. Without `grow_work` the work is that of these layers.
    """
    entries = sum(math.prod(shape) for shape in shapes.values())
    if entries > LARGEST_MODEL:
        raise ConfigError(
            f"a model of {entries:,} parameters is too large to predict (at most {LARGEST_MODEL:,}): "
            "take a part of its layers, and scale compute time and result"
        )
    fragments = schedule.fragment_count
    layers = _first_layers(shapes, most or SAMPLE, fragments)
    sampled = sum(math.prod(shape) for shape in layers)
    schedule = replace(schedule, warmup=0)
    with one_thread_if_busy():
        turns, operations, dependent = _as_leader(schedule, layers, workers, dense_below, repeats)
    best = min(turns, key=lambda turn: turn.work)
    factor = entries / max(1, sampled)
    totals = [turn.work for turn in turns]
    spread = statistics.median(totals) / min(totals) if min(totals) > 0 else 1.0
    job = grown(best.job, operations, factor, work=grow_work)
    return Played(job, factor * best.before, factor * best.after, dependent, spread)


def _first_layers(shapes: Shapes, most: int, least: int) -> list[tuple[int, ...]]:
    """Layers until there are enough entries, and one for each fragment."""
    found: list[tuple[int, ...]] = []
    for shape in shapes.values():
        if most <= 0 and len(found) >= least:
            break
        found.append(tuple(shape))
        most -= math.prod(shape)
    return found


class _Turn(NamedTuple):
    job: Job
    before: float
    after: float

    @property
    def work(self) -> float:
        return self.before + self.job.work + self.after


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


class _Worker:
    """One rank's replica and session."""

    def __init__(
        self, schedule: Schedule, layers: Sequence[tuple[int, ...]], rank_info: RankInfo, dense_below: int
    ) -> None:
        self.model = _Model(layers)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.session = PeriodicSession(
            self.model, schedule, optimizer, rank_info=rank_info, dense_below=dense_below
        )
        prepare_for(self.session.engine.exchanges, loud=False)

    def turn(self, mirror: Mirror, number: int) -> _Turn:
        """Steps until the next sync round, that one, and those until its result has been applied."""
        self.model.move(number)
        program, before = self._advance()
        while program is None:
            program, before = self._advance()
        job = mirror.run(program, number)
        after = 0.0
        while self.session.under_way:
            program, seconds = self._advance()
            if program is not None:  # the next fragment's turn: it is not played
                program.close()
                self.session.under_way.clear()
                break
            after = max(after, seconds)
        return _Turn(job, before, after)

    def _advance(self) -> tuple[Program | None, float]:
        began = time.perf_counter()
        program = self.session.advance()
        return program, time.perf_counter() - began


def _as_leader(
    schedule: Schedule, layers: Sequence[tuple[int, ...]], workers: int, dense_below: int, repeats: int
) -> tuple[list[_Turn], list[Recorded], bool]:
    """Play rank 0, or the one whose broadcast the others wait for; see `Player`."""
    rank, sent = 0, Blocks()
    for _ in range(4):
        worker = _Worker(schedule, layers, RankInfo(rank, workers), dense_below)
        mirror = Mirror(RankInfo(rank, workers), sent)
        try:
            began = time.perf_counter()
            turns = [worker.turn(mirror, 0)]
            # Among thousands of workers one turn takes long, and states and workspaces hardly any of it.
            least = 1 if workers > LARGE_GROUP else 2
            while len(turns) <= repeats and (len(turns) < least or time.perf_counter() - began < LONG_ENOUGH):
                turns.append(worker.turn(mirror, len(turns)))
        except ElsewhereError as elsewhere:
            rank = elsewhere.src
        except UnknownBlockError as unknown:
            other = _Worker(schedule, layers, RankInfo(unknown.src, workers), dense_below)
            with contextlib.suppress(ElsewhereError, UnknownBlockError):
                other.turn(Mirror(RankInfo(unknown.src, workers), sent), 0)
        except PayloadError:
            if rank:
                raise
            rank, sent = workers - 1, Blocks()
        else:
            dependent = worker.session.payload_bytes() is None
            return turns[1:] or turns, mirror.operations[len(turns) - 1], dependent
    raise AssertionError(f"{schedule}: every rank waits for what another one sends")
