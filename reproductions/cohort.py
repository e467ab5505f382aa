"""Many workers trained in one process, in lock-step: the exchanges that train for real, without a network.

Workers of a method that keeps consensus share one model; others have a replica each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from reproductions.base import Context
from thinwire.core.exchange import Exchange
from thinwire.drivers.lockstep import Lockstep
from thinwire.methods.registry import parse_exchange
from thinwire.net.meter import Tally
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.gradient import Session
from thinwire.tools.workloads import Dataset, build
from thinwire.tools.workloads.data import digits, mnist
from thinwire.tools.workloads.models import evaluate, loss

Gradients = list[dict[str, torch.Tensor]]
"""Of every worker, by parameter."""


@dataclass(frozen=True)
class Recipe:
    """How a cohort trains: everything that a run's figures depend on, except method and data."""

    model: str
    workers: int = 4
    steps: int = 200
    batch: int = 32
    learning_rate: float = 0.1
    momentum: float = 0.0
    seed: int = 0
    dense_below: int = 1024
    hidden: tuple[int, ...] = ()
    momentum_before: float = 0.0
    """Each worker's own momentum, before anything is compressed; instead of the optimizer's."""
    decay_at: float = 1.0
    """The part of the steps after which the learning rate is a tenth."""

    def key(self, method: str | Exchange, data: Dataset) -> str:
        """For `Context.once`."""
        return f"{method} | {data.name} {len(data.inputs)} | {asdict(self)}"


def images(context: Context) -> Dataset:
    """MNIST, or handwritten digits for a smoke run and where there is no data."""
    return mnist(context.data / "mnist") if context.has_data and not context.quick else digits()


@torch.no_grad()
def mean_into(target: nn.Module, models: Sequence[nn.Module]) -> None:
    """The mean of the replicas' parameters and buffers."""
    others = [model.state_dict() for model in models]
    for name, tensor in target.state_dict().items():
        tensor.copy_(torch.stack([other[name].float() for other in others]).mean(0))


class Cohort:
    """`recipe.workers` workers that train with one method."""

    def __init__(self, method: str | Exchange, recipe: Recipe, data: Dataset) -> None:
        self.recipe = recipe
        self.data = data
        self.exchange = parse_exchange(method)
        self.network = Lockstep(recipe.workers)
        first = build(recipe.model, data, recipe.seed, recipe.hidden)
        drifting = not self.exchange.traits.consensus
        self.models = [first] + [copy.deepcopy(first) for _ in range(recipe.workers - 1) if drifting]
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)
            for model in self.models
        ]
        self.sessions = [
            Session(
                self.model_of(rank).named_parameters(),
                self.exchange,
                rank_info=RankInfo(rank, recipe.workers),
                seed=recipe.seed,
                dense_below=recipe.dense_below,
                optimizer=self.optimizers[rank % len(self.optimizers)],
            )
            for rank in range(recipe.workers)
        ]
        self._order = torch.Generator().manual_seed(1 + recipe.seed)
        self._velocities: Gradients = []
        self.steps = 0

    def model_of(self, rank: int) -> nn.Module:
        return self.models[rank % len(self.models)]

    def gradients(self) -> tuple[float, Gradients]:
        """The mean loss of the next batches, and every worker's gradients on its own."""
        rows = torch.randint(
            len(self.data.inputs), (self.recipe.workers, self.recipe.batch), generator=self._order
        )
        total, found = 0.0, list[dict[str, torch.Tensor]]()
        for rank in range(self.recipe.workers):
            model = self.model_of(rank)
            model.zero_grad()
            inputs, targets = self.data.batch(rows[rank])
            value = loss(self.data, model(inputs), targets)
            value.backward()
            total += float(value.detach()) / self.recipe.workers
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        return total, found

    def average(self, gradients: Gradients) -> Gradients:
        """What the method makes of them, for every worker; written over them."""
        views = [s.engine.views(g, in_place=True) for s, g in zip(self.sessions, gradients, strict=True)]
        for session in self.sessions:
            session.engine.begin_step()
        kept = self.network.run([s.engine.program(v) for s, (_, v) in zip(self.sessions, views, strict=True)])
        for session in self.sessions:
            session.engine.end_step(kept)
        return [means for means, _ in views]

    def step(self, watch: Callable[[Gradients], None] | None = None) -> float:
        """One step of training; `watch` sees the workers' own gradients first. Returns the mean loss."""
        if (
            self.sessions[0].reconcile_every is not None
            and self.steps % self.sessions[0].reconcile_every == 0
        ):
            self.reconcile()
        value, gradients = self.gradients()
        if watch is not None:
            watch(gradients)
        means = self.average(self._with_momentum(gradients))
        if self.steps == int(self.recipe.decay_at * self.recipe.steps):
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["lr"] *= 0.1
        for rank, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                parameter.grad = means[rank][name]
            self.optimizers[rank].step()
        self.steps += 1
        return value

    def _with_momentum(self, gradients: Gradients) -> Gradients:
        factor = self.recipe.momentum_before
        if not factor:
            return gradients
        if not self._velocities:
            self._velocities = [{n: torch.zeros_like(g) for n, g in own.items()} for own in gradients]
        for velocities, own in zip(self._velocities, gradients, strict=True):
            for name, gradient in own.items():
                gradient.copy_(velocities[name].mul_(factor).add_(gradient))
        return gradients

    def reconcile(self) -> None:
        """Average the replicas' parameters."""
        if self.steps and len(self.models) > 1:
            self.network.run([session.reconciliation() for session in self.sessions])

    def spread(self) -> float:
        """The largest distance of a replica from the mean of all, relative to its norm."""
        flats = [torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in self.models]
        mean = torch.stack(flats).mean(0)
        farthest = max(float((flat - mean).square().sum()) for flat in flats)
        return (farthest / float(mean.square().sum())) ** 0.5

    def mean_model(self) -> nn.Module:
        """A model with the mean of all replicas' parameters and buffers."""
        mean = copy.deepcopy(self.models[0])
        mean_into(mean, self.models)
        return mean

    def spent(self) -> Tally:
        """What rank 0 has sent and received so far."""
        return self.network.meters[0].total


def train(
    method: str | Exchange, recipe: Recipe, data: Dataset, *, looks: int = 4, test_rows: int = 0
) -> dict[str, Any]:
    """Train and return JSON: losses, accuracies at `looks` steps, bytes a step and rounds of rank 0."""
    cohort = Cohort(method, recipe, data)
    losses: list[float] = []
    accuracies: list[tuple[int, float]] = []
    every = max(1, recipe.steps // looks)
    for number in range(1, recipe.steps + 1):
        losses.append(cohort.step())
        if number % every == 0 or number == recipe.steps:
            accuracies.append((number, evaluate(cohort.models[0], data, test_rows)[1]))
    spent = cohort.spent()
    return {
        "losses": losses,
        "accuracies": accuracies,
        "accuracy": accuracies[-1][1],
        "payload": (spent.payload_bytes + spent.overhead_bytes) / recipe.steps,
        "sent": spent.sent_bytes / recipe.steps,
        "rounds": spent.operations / recipe.steps,
        "work_seconds": sum(session.meter.work_seconds for session in cohort.sessions) / recipe.workers,
    }
