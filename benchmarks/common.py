"""What benchmarks share: options, a clock, progress, and steps of several models in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.tools.cli.show import errors, progress, table
from thinwire.tools.compare.settings import split
from thinwire.tools.devices import finish

Size = Annotated[int, typer.Option(min=1, help="Entries of the float32 tensor.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads for torch and the kernels.")]

ONE_COPY = "1 copy = the time to copy the same tensor in memory"

T = TypeVar("T")
Action = Callable[[], object]
Progress = Callable[[str], None]
"""Called with the name of what is measured next or has just been measured, once for each part."""

LAYERS, WIDTH, BATCH = 20, 360, 32


@contextmanager
def measuring(parts: int) -> Generator[Progress]:
    """A bar for so many parts; a usage error inside is one line and exit code 2."""
    with errors(), progress(parts) as advance:
        yield lambda name: advance(name, 1)


def chosen_methods(given: Sequence[str] | None) -> list[str]:
    """The methods of `-m`, each of which may have several with commas; empty for the default."""
    with errors():
        return [part for text in given or () for part in split(text)]


def show(title: str, rows: Sequence[T], columns: Mapping[str, Callable[[T], str]]) -> None:
    """A table: the name of each column, and what it says of a row."""
    table(title, tuple(columns), [tuple(column(row) for column in columns.values()) for row in rows])


def target(copies: float | None) -> str:
    return "-" if copies is None else f"{copies:.2f}"


def from_rank_0(progress: Progress | None) -> Callable[[int, str], None]:
    """What rank 0 reports goes to `progress`."""

    def on_report(rank: int, name: str) -> None:
        if rank == 0 and progress is not None:
            progress(name)

    return on_report


def seconds(action: Action, clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    action()
    return clock() - began


@contextmanager
def threads_of_torch(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over the rounds of one's step time by that of the other in the same round."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def deep_mlp() -> nn.Module:
    """2.6 million parameters in equal layers, the same on all ranks."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


class Trainers:
    """Models that take their steps in turn, one step each, in an order that rotates.

    What disturbs the machine disturbs all of them.
    """

    def __init__(
        self,
        models: Mapping[str, DistributedDataParallel],
        rank: int,
        device: torch.device | None = None,
    ) -> None:
        self.models = models
        self.optimizers = {name: torch.optim.SGD(m.parameters(), lr=1e-3) for name, m in models.items()}
        self.device = device or torch.device("cpu")
        data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
        self.data: Tensor = data.to(self.device)

    def step(self, name: str) -> None:
        self.optimizers[name].zero_grad()
        self.models[name](self.data).square().mean().backward()
        self.optimizers[name].step()
        finish(self.device)

    def rounds(self, count: int, warm_up: int, done: Callable[[], Any]) -> dict[str, list[float]]:
        """Seconds of every step after `warm_up` rounds; `done` is called after each of those rounds."""
        names = list(self.models)
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(warm_up + count):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                took = seconds(lambda chosen=name: self.step(chosen))
                if number >= warm_up:
                    times[name].append(took)
            if number >= warm_up:
                done()
        return times
