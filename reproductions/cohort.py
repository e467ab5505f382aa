"""Many workers trained in one process, in lock-step: the exchanges that train for real, without a network."""

from __future__ import annotations

import copy
import gc
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from reproductions.lstm_gradients import lstm_gradients
from reproductions.parts import Context
from thinwire.averaging import Schedule
from thinwire.core.channel import Program
from thinwire.core.exchange import Exchange
from thinwire.drivers.lockstep import Lockstep
from thinwire.errors import ConfigError
from thinwire.methods.adam import Adam
from thinwire.methods.registry import parse, parse_exchange
from thinwire.net.meter import Tally
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.gradient import Session
from thinwire.sessions.periodic import PeriodicSession
from thinwire.tools.workloads import Dataset, build
from thinwire.tools.workloads.data import digits, mnist
from thinwire.tools.workloads.models import LstmLanguageModel, evaluate, loss

Gradients = list[dict[str, torch.Tensor]]
"""Of every worker, by parameter."""
Watch = Callable[[Gradients], None]
POINTS = 40
"""Of a curve of losses that is kept."""
TOGETHER = 16
"""From so many workers with one model on, their gradients are computed in one pass."""


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
    optimizer: Literal["sgd", "adamw"] = "sgd"
    warm_up: int = 0
    """Steps in which the learning rate rises to its full value."""
    cosine: bool = False
    """The learning rate falls to a tenth by a cosine."""
    clip: float | None = None
    """The largest norm of the gradient that the optimizer gets."""
    uncompressed: int = 0
    """Steps at the beginning that average gradients exactly, for methods that leave the optimizer its own
    momentum. They are not metered."""
    group_norm: bool = False
    """Norms of groups of channels in place of those of batches, which batches of a few images cannot have."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rate = self.learning_rate * min(1.0, (step + 1) / max(1, self.warm_up))
        if self.cosine:
            done = max(0, step - self.warm_up) / max(1, self.steps - self.warm_up)
            rate *= 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        return rate * (0.1 if step >= int(self.decay_at * self.steps) else 1.0)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """One step of the optimizer, with this learning rate and clipping."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()

    def optimizer_for(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=self.learning_rate)
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)


def images(context: Context) -> Dataset:
    """MNIST, or handwritten digits for a smoke run and where there is no data."""
    return _mnist(context.data / "mnist") if context.has_data and not context.quick else digits()


@lru_cache(maxsize=1)
def _mnist(folder: Path) -> Dataset:
    return mnist(folder)


def by_groups(model: nn.Module) -> None:
    """Replace all norms of batches by norms of 8 groups of channels."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(8, child.num_features))


@torch.no_grad()
def mean_into(target: nn.Module, models: Sequence[nn.Module]) -> None:
    """The mean of the replicas' parameters and buffers."""
    others = [model.state_dict() for model in models]
    for name, tensor in target.state_dict().items():
        tensor.copy_(torch.stack([other[name].float() for other in others]).mean(0))


def average(network: Lockstep, sessions: Sequence[Session], gradients: Gradients) -> Gradients:
    """What the sessions' method makes of the gradients, for every worker; written over them."""
    views = [s.engine.views(g, in_place=True) for s, g in zip(sessions, gradients, strict=True)]
    for session in sessions:
        session.engine.begin_step()
    committed = network.run([s.engine.program(v) for s, (_, v) in zip(sessions, views, strict=True)])
    for session in sessions:
        session.engine.end_step(committed)
    return [means for means, _ in views]


class Workers(ABC):
    """Models, optimizers and batches of `recipe.workers` workers; they share `replicas` of one model."""

    def __init__(self, recipe: Recipe, data: Dataset, replicas: int) -> None:
        self.recipe = recipe
        self.data = data
        self.network = Lockstep(recipe.workers)
        first = build(recipe.model, data, recipe.seed, recipe.hidden)
        if recipe.group_norm:
            by_groups(first)
        self.models = [first, *(copy.deepcopy(first) for _ in range(replicas - 1))]
        self.optimizers = [recipe.optimizer_for(model) for model in self.models]
        self.losses: list[float] = []
        self.steps: int = 0
        self._order = torch.Generator().manual_seed(1 + recipe.seed)

    def model_of(self, rank: int) -> nn.Module:
        return self.models[rank % len(self.models)]

    def next_rows(self) -> torch.Tensor:
        """The next batch of every worker."""
        shape = (self.recipe.workers, self.recipe.batch)
        return torch.randint(len(self.data.inputs), shape, generator=self._order)

    def backward(self, rank: int, rows: torch.Tensor) -> float:
        """Leaves a worker's gradients in its model; returns its loss."""
        model = self.model_of(rank)
        model.zero_grad()
        inputs, targets = self.data.batch(rows)
        value = loss(self.data, model(inputs), targets)
        value.backward()
        return float(value.detach())

    @abstractmethod
    def step(self) -> float:
        """One step of training. Returns the mean loss."""

    def run(self, looks: int = 1) -> Iterator[int]:
        """Train for `recipe.steps` steps; yields `looks` step numbers, the last among them."""
        every = max(1, self.recipe.steps // looks)
        try:
            for number in range(1, self.recipe.steps + 1):
                self.losses.append(self.step())
                if number == 1:
                    gc.freeze()  # hundreds of sessions need not be searched for garbage again and again
                if number % every == 0 or number == self.recipe.steps:
                    yield number
        finally:
            gc.unfreeze()

    def mean_model(self) -> nn.Module:
        """A model with the mean of all replicas' parameters and buffers."""
        mean = copy.deepcopy(self.models[0])
        mean_into(mean, self.models)
        return mean

    def sync(self) -> None:  # noqa: B027 (most methods have nothing to do)
        """Make all replicas equal, where the method does so at the end."""

    def spent(self) -> Tally:
        """What rank 0 has sent and received so far."""
        return self.network.meters[0].total


class Cohort(Workers):
    """Workers that train with one method. If it keeps them in consensus they share one model."""

    def __init__(self, method: str | Exchange, recipe: Recipe, data: Dataset) -> None:
        self.exchange = parse_exchange(method)
        super().__init__(recipe, data, 1 if self.exchange.traits.consensus else recipe.workers)
        self.sessions = [
            Session(
                self.model_of(rank).named_parameters(),
                self.exchange,
                rank_info=RankInfo(rank, recipe.workers),
                seed=recipe.seed,
                dense_below=recipe.dense_below,
                optimizer=self._optimizer_of(rank),
            )
            for rank in range(recipe.workers)
        ]
        self._velocities: Gradients = []
        self._watch: Watch | None = None
        self._together = len(self.models) == 1 and recipe.workers >= TOGETHER
        if not self._together:
            for model in self.models:
                cast(Any, model).to(memory_format=torch.channels_last)  # convolutions are a quarter faster

    def _optimizer_of(self, rank: int) -> torch.optim.Optimizer | None:
        """Lazy methods read the learning rate on every rank; `adam` changes its optimizer, once."""
        if rank >= len(self.optimizers) and isinstance(self.exchange, Adam):
            return None
        return self.optimizers[rank % len(self.optimizers)]

    def gradients(self) -> tuple[float, Gradients]:
        """The mean loss of the next batches, and every worker's gradients on its own."""
        if self._together:
            return self._gradients_together()
        total, found = 0.0, list[dict[str, torch.Tensor]]()
        for rank, rows in enumerate(self.next_rows()):
            total += self.backward(rank, rows) / self.recipe.workers
            parameters = self.model_of(rank).named_parameters()
            grads = {name: p.grad for name, p in parameters if p.grad is not None}
            found.append({n: g.clone(memory_format=torch.contiguous_format) for n, g in grads.items()})
        return total, found

    def _gradients_together(self) -> tuple[float, Gradients]:
        """The same in one pass: a batch of all workers' rows, and a gradient for each of them."""
        rows = self.next_rows()
        parts = self.data.batch(rows.flatten())
        inputs, targets = (part.reshape(*rows.shape, *part.shape[1:]) for part in parts)
        model = self.models[0]
        if isinstance(model, LstmLanguageModel):
            gradients, values = lstm_gradients(model, inputs, targets)
        else:
            gradients, values = self._mapped(model, inputs, targets)
        found = [{name: own[rank] for name, own in gradients.items()} for rank in range(len(rows))]
        return float(values.mean()), found

    def _mapped(
        self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Gradients and losses of all workers, by `vmap`."""
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        buffers = dict(model.named_buffers())

        def value_of(given: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss(self.data, functional_call(model, (given, buffers), (x,)), y)

        each = vmap(grad_and_value(value_of), in_dims=(None, 0, 0))
        with sdpa_kernel(SDPBackend.MATH):  # a fused attention would be computed worker by worker
            return each(parameters, inputs, targets)

    def average(self, gradients: Gradients) -> Gradients:
        if self.steps < self.recipe.uncompressed:
            means = {name: torch.stack([own[name] for own in gradients]).mean(0) for name in gradients[0]}
            return [means for _ in self.models]
        return average(self.network, self.sessions, gradients)

    def watched(self, watch: Watch) -> None:
        """Train to the end; `watch` sees the workers' own gradients before each exchange."""
        self._watch = watch
        for _ in self.run():
            pass

    def step(self) -> float:
        every = self.sessions[0].reconcile_every
        if every is not None and self.steps % every == 0:
            self.reconcile()
        value, gradients = self.gradients()
        if self._watch is not None:
            self._watch(gradients)
        means = self.average(self._with_momentum(gradients))
        for rank, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                parameter.grad = means[rank][name]
            self.recipe.update(model, self.optimizers[rank], self.steps)
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


class LocalCohort(Workers):
    """A replica per worker, and one schedule. The batches are those of `Cohort` with the same seed.

    With `sorted_labels` every worker sees only a stretch of the data sorted by label: shards that are as
    different as can be.
    """

    def __init__(
        self, method: str | Exchange, recipe: Recipe, data: Dataset, *, sorted_labels: bool = False
    ) -> None:
        schedule = parse(method)
        if not isinstance(schedule, Schedule):
            raise ConfigError(f"{method} is not a schedule")
        super().__init__(recipe, data, recipe.workers)
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
        self._by_label = torch.argsort(data.targets, stable=True) if sorted_labels else None

    def step(self) -> float:
        """One local step of every worker, and a sync round if it is due."""
        total = 0.0
        for rank, rows in enumerate(self.next_rows()):
            total += self.backward(rank, self._shard(rank, rows)) / self.recipe.workers
        self._run(session.gradient_program() for session in self.sessions)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            self.recipe.update(model, optimizer, self.steps)
        self.steps += 1
        self._run(session.advance() for session in self.sessions)
        return total

    def _run(self, programs: Iterable[Program | None]) -> None:
        """All ranks have one, or none has."""
        due = [program for program in programs if program is not None]
        if due:
            self.network.run(due)

    def _shard(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        if self._by_label is None:
            return rows
        return self._by_label[(rows + rank * len(self._by_label)) // self.recipe.workers]

    def sync(self) -> None:
        self.network.run([session.sync_program() for session in self.sessions])


class Training(msgspec.Struct):
    """What came of a run.

    losses: (step, mean training loss of the steps since the point before), at most `POINTS` of them.
    accuracies: (step, test accuracy) at some steps; test_loss: at the end.
    payload, sent: bytes of rank 0 per step, of those that are metered.
    """

    losses: list[tuple[int, float]]
    accuracies: list[tuple[int, float]]
    payload: float
    sent: float
    test_loss: float = math.nan

    @property
    def accuracy(self) -> float:
        return self.accuracies[-1][1]


def thinned(losses: Sequence[float], points: int = POINTS) -> list[tuple[int, float]]:
    """Means of as many stretches of steps, with the last step of each."""
    length = max(1, -(-len(losses) // points))
    ends = [*range(length, len(losses), length), len(losses)]
    found = [(end, losses[begin:end]) for begin, end in itertools.pairwise((0, *ends))]
    return [(end, float(f"{sum(own) / len(own):.6g}")) for end, own in found if own]


def cohort_of(method: str | Exchange, recipe: Recipe, data: Dataset) -> Workers:
    """The workers for a method or a schedule."""
    return (LocalCohort if isinstance(parse(method), Schedule) else Cohort)(method, recipe, data)


def train(
    method: str | Exchange, recipe: Recipe, data: Dataset, *, looks: int = 4, test_rows: int = 0
) -> Training:
    """Train, and look at the test accuracy `looks` times."""
    cohort = cohort_of(method, recipe, data)
    accuracies: list[tuple[int, float]] = []
    spent, last_loss = cohort.spent(), math.nan
    for number in cohort.run(looks):
        spent = cohort.spent()
        if number == recipe.steps:
            cohort.sync()
        last_loss, accuracy = evaluate(cohort.models[0], data, test_rows)
        accuracies.append((number, accuracy))
    metered = recipe.steps - recipe.uncompressed
    payload = (spent.payload_bytes + spent.overhead_bytes) / metered
    sent = spent.sent_bytes / metered
    return Training(thinned(cohort.losses), accuracies, payload, sent, last_loss)
