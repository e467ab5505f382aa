"""Workers that train by themselves and meet as a schedule says, in lock-step in one process."""

from __future__ import annotations

import copy

import torch

from reproductions.cohort import Recipe
from thinwire.averaging import Schedule
from thinwire.drivers.lockstep import Lockstep
from thinwire.errors import ConfigError
from thinwire.methods.registry import parse
from thinwire.net.meter import Tally
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.periodic import PeriodicSession
from thinwire.tools.workloads import Dataset, build
from thinwire.tools.workloads.models import loss


class LocalCohort:
    """`recipe.workers` replicas with one schedule. The batches are those of `Cohort` with the same seed.

    With `sorted_labels` every worker sees only a stretch of the data sorted by label: shards that are as
    different as can be.
    """

    def __init__(self, method: str, recipe: Recipe, data: Dataset, *, sorted_labels: bool = False) -> None:
        schedule = parse(method)
        if not isinstance(schedule, Schedule):
            raise ConfigError(f"{method} is not a schedule")
        first = build(recipe.model, data, recipe.seed, recipe.hidden)
        self.recipe, self.data = recipe, data
        self.models = [first, *(copy.deepcopy(first) for _ in range(recipe.workers - 1))]
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
            for model in self.models
        ]
        self.sessions = [
            PeriodicSession(
                model,
                schedule,
                optimizer,
                rank_info=RankInfo(rank, recipe.workers),
                seed=recipe.seed,
                dense_below=recipe.dense_below,
            )
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True))
        ]
        self._network = Lockstep(recipe.workers)
        self._order = torch.Generator().manual_seed(1 + recipe.seed)
        self._by_label = torch.argsort(data.targets, stable=True) if sorted_labels else None

    def step(self) -> float:
        """One local step of everybody, and a meeting if it is time. Returns the mean loss."""
        workers, total = self.recipe.workers, 0.0
        rows = torch.randint(len(self.data.inputs), (workers, self.recipe.batch), generator=self._order)
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            inputs, targets = self.data.batch(self._shard(rank, rows[rank]))
            optimizer.zero_grad()
            value = loss(self.data, model(inputs), targets)
            value.backward()
            optimizer.step()
            total += float(value.detach()) / workers
        programs = [session.advance() for session in self.sessions]
        due = [program for program in programs if program is not None]
        if due:
            self._network.run(due)
        return total

    def _shard(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        if self._by_label is None:
            return rows
        return self._by_label[(rows + rank * len(self._by_label)) // self.recipe.workers]

    def sync(self) -> None:
        """Make all replicas equal."""
        self._network.run([session.sync_program() for session in self.sessions])

    def spent(self) -> Tally:
        """What rank 0 has sent and received so far."""
        return self._network.meters[0].total
