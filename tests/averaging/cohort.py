"""Replicas in lock-step in one process, and the schedules that the laws hold."""

import copy
from itertools import pairwise

import torch
from torch import nn

from tests.hosts.common import batch, mlp
from thinwire import list_schedules, parse
from thinwire.averaging.spares import Spares
from thinwire.drivers import Lockstep
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.periodic import PeriodicSession

# Whoever reads the memory of a sync round that is over finds no number.
Spares.poison = True
# Beside each schedule's defaults.
ALSO = (
    "localsgd(every=1)",
    "localsgd(every=3, momentum='reset')",
    "localsgd(every=3, momentum='average', anchor='cpu')",
    "localsgd(every=2, warmup=3)",
    "localsgd(every=4, fragments=3)",
    "spasgd(groups=3)",
    "spasgd(groups=5, order='shuffled', momentum='average')",
    "pqasgd(every=2, bits=8, norm='l2', bucket=64)",
    "pqasgd(every=6, fragments=2, overlap=3)",
    "diloco(every=3)",
    "diloco(every=6, fragments=3, overlap=2)",
    "postlocal(every=3, warmup=4)",
    "postlocal(every=4, bits=4, warmup=5, warmup_bits=4, overlap=2)",
    "periodic(every=3, exchange=topk(ratio=0.2))",
    "periodic(every=3, exchange=powersgd(rank=2), outer_lr=0.7, outer_momentum=0.5)",
    "periodic(every=4, exchange=topk(ratio=0.2), fragments=2)",
    "periodic(every=2, exchange=scalecom(ratio=0.1), warmup=2, momentum='average')",
    "periodic(every=3, exchange=hierarchical(outer=topk(ratio=0.2), local=2))",
)
CONFIGURATIONS = tuple(dict.fromkeys([str(cls()) for cls in list_schedules().values()] + list(ALSO)))


class Normed(nn.Module):
    """With buffers: batch-norm statistics and a count."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.norm = nn.BatchNorm1d(40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def normed() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Normed(mlp())


def wide() -> nn.Module:
    """Its layers are so long that links differ in the cheapest way to average them."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        widths = (40, 800, 40, 800, 40)
        return Normed(nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Cohort:
    """`size` replicas with their optimizers and sessions."""

    def __init__(
        self,
        method: str,
        size: int,
        *,
        make=mlp,
        optimizer=sgd,
        driver: Lockstep | None = None,
        link: Link | None = None,
    ) -> None:
        self.driver = driver or Lockstep(size)
        model = make()
        self.models = [copy.deepcopy(model) for _ in range(size)]
        self.optimizers = [optimizer(model) for model in self.models]
        self.sessions = [
            PeriodicSession(
                replica,
                parse(method),
                optimizer,
                rank_info=RankInfo(rank, size),
                dense_below=64,
                link=link,
            )
            for rank, (replica, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True))
        ]

    def train(self, steps, *, poisoned: int | None = None) -> None:
        """Take these steps; the rank `poisoned` has gradients that are not finite."""
        for step in steps:
            for rank in range(len(self.models)):
                self.backward(rank, step, torch.nan if rank == poisoned else 1.0)
            self.average_gradients()
            for optimizer in self.optimizers:
                optimizer.step()
            self.advance()

    def backward(self, rank: int, step: int, factor: float = 1.0) -> None:
        self.models[rank].zero_grad()
        (factor * self.models[rank](batch(rank, step)).square().mean()).backward()

    def average_gradients(self) -> None:
        """In the warm-up of some schedules."""
        programs = [session.gradient_program() for session in self.sessions]
        if programs[0] is not None:
            self.driver.run(programs)

    def local_step(self, rank: int, step: int) -> None:
        self.backward(rank, step)
        self.optimizers[rank].step()

    def advance(self) -> None:
        programs = [session.advance() for session in self.sessions]
        if programs[0] is not None:
            self.driver.run(programs)

    def sync(self) -> None:
        self.driver.run([session.sync_program() for session in self.sessions])


def everything(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def equal(a: nn.Module, b: nn.Module) -> bool:
    """Parameters and buffers, to the last bit."""
    return all(torch.equal(x, y) for x, y in zip(everything(a), everything(b), strict=True))


def equal_parameters(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
