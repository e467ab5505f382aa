"""Twenty steps of every method and schedule in lock-step; one rank has a non-finite gradient once."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import nn

import thinwire
from tests.averaging.cohort import CONFIGURATIONS as SCHEDULES
from tests.hosts.common import batch, mlp
from tests.laws.cohort import CONFIGURATIONS as METHODS
from thinwire import Session
from thinwire.core.exchange import Exchange
from thinwire.drivers import Lockstep
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.periodic import PeriodicSession

SIZES = (2, 4)
STEPS, BAD_STEP, BAD_RANK = 20, 7, 1
DENSE_BELOW = 200  # the vectors of both models are small


def transformer() -> nn.Module:
    """The same weights wherever it is called. A batch of `mlp` is a sequence of four tokens here."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Linear(40, 32), nn.Unflatten(0, (1, -1)), block, nn.Linear(32, 40))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": lambda: mlp(depth=2), "transformer": transformer}
OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor], float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, _: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters, _: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters, beta1: torch.optim.AdamW(parameters, lr=0.01, betas=(beta1, 0.999)),
}
NEEDS = {"any": ("sgd", "momentum", "adamw"), "Adam": ("adamw",)}


@dataclass(frozen=True)
class Case:
    """One training."""

    method: str
    size: int
    model: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.method}, {self.size} ranks, {self.model}, {self.optimizer}"


def cases() -> Iterator[Case]:
    """Networks with SGD and momentum, transformers with AdamW; each as far as the method allows it."""
    for method, size in itertools.product(dict.fromkeys((*METHODS, *SCHEDULES)), SIZES):
        chosen = thinwire.parse(method)
        needs = chosen.traits.optimizer if isinstance(chosen, Exchange) else "any"
        for optimizer in NEEDS.get(needs, ("sgd",)):
            yield Case(method, size, "transformer" if optimizer == "adamw" else "mlp", optimizer)


@dataclass(frozen=True)
class Trajectory:
    """What must not change: all parameters after every step, and what each rank has sent."""

    parameters: list[str]
    payload_bytes: list[int]
    operations: list[int]


def recorded(case: Case) -> tuple[str, dict[str, object]]:
    """The name of a case, and its trajectory or its error, as JSON has it."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # for `hierarchical`
    try:
        return str(case), asdict(Training(case).run())
    except Exception as error:
        return str(case), {"error": f"{type(error).__name__}: {error}"}


class Training:
    """All ranks of a case."""

    def __init__(self, case: Case) -> None:
        method = thinwire.parse(case.method)
        model = MODELS[case.model]()
        self.driver = Lockstep(case.size)
        self.models = [copy.deepcopy(model) for _ in range(case.size)]
        beta1 = getattr(method, "beta1", 0.9)
        self.optimizers = [OPTIMIZERS[case.optimizer](model.parameters(), beta1) for model in self.models]
        self.sessions: list[Session | PeriodicSession] = []
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            place = RankInfo(rank, case.size)
            if isinstance(method, Exchange):
                named = list(model.named_parameters())
                session = Session(
                    named, method, rank_info=place, dense_below=DENSE_BELOW, optimizer=optimizer
                )
            else:
                session = PeriodicSession(model, method, optimizer, rank_info=place, dense_below=DENSE_BELOW)
            self.sessions.append(session)

    def run(self) -> Trajectory:
        digests: list[str] = []
        for step in range(STEPS):
            for rank in range(len(self.models)):
                self._backward(rank, step)
            self._average_gradients()
            for rank, optimizer in enumerate(self.optimizers):
                if self._steps(rank):
                    optimizer.step()
            self._average_parameters()
            digests.append(digest(self.models))
        meters = self.driver.meters
        return Trajectory(digests, [m.payload_bytes for m in meters], [m.total.operations for m in meters])

    def _backward(self, rank: int, step: int) -> None:
        factor = torch.nan if (rank, step) == (BAD_RANK, BAD_STEP) else 1.0
        self.optimizers[rank].zero_grad()
        (factor * self.models[rank](batch(rank, step)).square().mean()).backward()

    def _average_gradients(self) -> None:
        first = self.sessions[0]
        if isinstance(first, PeriodicSession):
            programs = [session.gradient_program() for session in self.sessions]
            if programs[0] is not None:
                self.driver.run(programs)
            return
        programs, results = [], []
        for session, model in zip(self.sessions, self.models, strict=True):
            session.engine.begin_step()
            result, views = session.engine.views({name: p.grad for name, p in model.named_parameters()})
            results.append(result)
            programs.append(session.engine.program(views))
        committed = self.driver.run(programs)
        for session, model, result in zip(self.sessions, self.models, results, strict=True):
            session.engine.end_step(committed)
            for name, parameter in model.named_parameters():
                parameter.grad = result[name]

    def _steps(self, rank: int) -> bool:
        """Whether this rank's optimizer takes the step: not with averaged gradients that are not finite."""
        if isinstance(self.sessions[rank], PeriodicSession):
            return True
        return all(bool(p.grad.isfinite().all()) for p in self.models[rank].parameters())

    def _average_parameters(self) -> None:
        if isinstance(self.sessions[0], PeriodicSession):
            programs = [session.advance() for session in self.sessions]
            if programs[0] is not None:
                self.driver.run(programs)


def digest(models: Iterable[nn.Module]) -> str:
    """Equal for equal bits of all parameters; those that are not finite count as one and the same."""
    total = hashlib.blake2b(digest_size=8)
    for parameter in (parameter for model in models for parameter in model.parameters()):
        found = parameter.detach().nan_to_num(nan=123.0, posinf=123.0, neginf=123.0)
        total.update(found.contiguous().view(-1).view(torch.uint8).numpy())
    return total.hexdigest()
