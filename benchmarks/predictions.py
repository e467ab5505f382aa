"""Predicted step times against measured ones, on real slow links of the lab."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Progress, chosen_methods, measuring, show
from thinwire import predict
from thinwire.averaging.base import Schedule
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError
from thinwire.methods.registry import parse
from thinwire.net.costs import Link
from thinwire.net.launch import Worker, run_local
from thinwire.predict.buckets import Shapes
from thinwire.predict.probe import Calibration, calibrate
from thinwire.tools.cli.show import JsonFile, Methods, errors, save
from thinwire.tools.lab import namespaces
from thinwire.tools.lab.hosts import hosts_for

LINKS = ("lab:10mbit", "lab:50mbit", "lab:100mbit", "lab:1000mbit")
METHODS = (
    "dense",
    "qsgd(bits=4)",
    "topk(ratio=0.01)",
    "powersgd(rank=4)",
    "delayed(method=topk(ratio=0.01))",
    "pqasgd(every=8, bits=4)",
    "pqasgd(every=16, bits=4, overlap=8)",
)
WORKERS = (2, 4)
WITHIN, SHARE = 0.2, 0.9
BATCH = 64
WARM_UP, LEAST_TURNS, MOST_TURNS, SECONDS = 1, 2, 25, 2.5
# Steps of a turn with a delay.
DELAYED_STEPS = 4


@dataclass(frozen=True)
class Row:
    """One method on one link; seconds of a step."""

    link: str
    workers: int
    method: str
    low: float
    predicted: float
    high: float
    measured: float
    compute: float
    compression: float
    wire: float
    """All operations one after the other, on the probed link."""
    calibration: Calibration

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def passed(self) -> bool:
        return abs(self.error) <= WITHIN

    @property
    def cell(self) -> tuple[str, int, str]:
        return self.link, self.workers, self.method

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error, "passed": self.passed}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Row:
        made = {name: value for name, value in record.items() if name not in ("error", "passed")}
        link, overheads = record["calibration"]
        made["calibration"] = Calibration(Link(**link), predict.Overheads(**overheads))
        return Row(**made)


def command(
    link: Annotated[
        list[str] | None, typer.Option(help="Such as lab:100mbit; may be given several times.")
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option(min=2, help="Hosts; may be given several times.")
    ] = None,
    method: Methods = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Add every result to this file at once; what is in it is not measured again."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Predicted step times against measured ones, on slow links of the lab (needs root)."""
    links, methods = link or list(LINKS), chosen_methods(method) or list(METHODS)
    counts = workers or list(WORKERS)
    with errors():
        check_links(links)
        book = Book(record)
    with measuring(len(links) * len(methods) * len(counts)) as progress:
        results = [row for count in counts for row in run(links, methods, count, progress, book)]
    show(
        f"a step of the 784-1024-1024-10 network; {verdict(results)}",
        results,
        {
            "hosts": lambda r: str(r.workers),
            "link": lambda r: r.link.removeprefix("lab:"),
            "method": lambda r: r.method,
            "predicted": lambda r: f"{1e3 * r.predicted:.1f} ms",
            "range": lambda r: f"{1e3 * r.low:.1f} to {1e3 * r.high:.1f}",
            "measured": lambda r: f"{1e3 * r.measured:.1f} ms",
            "error": lambda r: f"{100 * r.error:+.0f} %",
            "compute": lambda r: f"{1e3 * r.compute:.1f} ms",
            "compression": lambda r: f"{1e3 * r.compression:.1f} ms",
            "on the link": lambda r: f"{1e3 * r.wire:.1f} ms",
        },
    )
    save(json_file, [row.to_json() for row in results])


class Book:
    """The results so far, in a file with one JSON record per line, if there is one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._rows: dict[tuple[str, int, str], Row] = {}
        if path is None or not path.exists():
            return
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = Row.from_json(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"--record: line {number} of {path} is not a result of this benchmark ({error}): "
                    "delete the line, or take another file"
                ) from None
            self._rows[row.cell] = row

    def add(self, row: Row) -> None:
        self._rows[row.cell] = row
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row.to_json()) + "\n")

    def find(self, link: str, workers: int, method: str) -> Row | None:
        return self._rows.get((link, workers, method))


def verdict(rows: Sequence[Row]) -> str:
    """How many predictions are close, and how many should be."""
    close = sum(row.passed for row in rows)
    return (
        f"{close} of {len(rows)} predictions within {100 * WITHIN:.0f} % "
        f"({100 * close / max(1, len(rows)):.0f} %); target: {math.ceil(SHARE * len(rows))}"
    )


def check_links(links: Sequence[str]) -> None:
    for text in links:
        if not text.startswith("lab:"):
            raise ConfigError(f"--link: only the lab's links are measured here: lab:{text}, not {text}")
    reason = namespaces.unavailable()
    if reason is not None:
        raise ConfigError(f"the lab is not available here: {reason}")


def network() -> nn.Module:
    """The size of the MNIST network 784-1024-1024-10, the same on all ranks."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def run(
    links: Sequence[str] = LINKS,
    chosen: Sequence[str] = METHODS,
    workers: int = WORKERS[-1],
    progress: Progress | None = None,
    book: Book | None = None,
) -> list[Row]:
    """Calibrate on each link, predict, then train some seconds with each method, on all workers at once."""
    methods = [str(parse(text)) for text in chosen]
    kept = book or Book()

    def on_report(rank: int, message: object) -> None:
        if rank == 0 and isinstance(message, Row):
            kept.add(message)
        elif rank == 0 and progress is not None:
            progress(str(message))

    for text in links:
        left = [method for method in methods if kept.find(text, workers, method) is None]
        for method in methods:
            if method not in left and progress is not None:
                progress(f"{method} on {text}, {workers} hosts: recorded")
        if left:
            with hosts_for(text, workers) as hosts:
                run_local(
                    _work,
                    workers,
                    text,
                    left,
                    timeout=1800,
                    group_timeout=300,
                    on_report=on_report,
                    hosts=hosts,
                )
    found = [kept.find(text, workers, method) for text in links for method in methods]
    return [row for row in found if row is not None]


def _work(worker: Worker, link: str, methods: Sequence[str]) -> None:
    """Report a row for each method."""
    torch.set_num_threads(1)
    # The workers share this machine: all of them measure at once, and none has a core to spare then.
    cores = max(1.0, (os.cpu_count() or 1) / worker.size)
    found = calibrate()
    shapes = {name: tuple(p.shape) for name, p in network().named_parameters()}
    for method in methods:
        worker.report(f"{method} on {link}, {worker.size} hosts")
        compute, profiles, measured = _measured(method, shapes, found.link)
        ranges = [
            each.interval(found.link, compute, cores=cores, overheads=found.overheads) for each in profiles
        ]
        low, predicted, high = (_slowest(statistics.median(each)) for each in zip(*ranges, strict=True))
        row = Row(
            link,
            worker.size,
            method,
            low,
            predicted,
            high,
            measured,
            compute.seconds,
            statistics.median(each.compression_seconds for each in profiles),
            profiles[0].link_seconds(found.link),
            found,
        )
        worker.report(row)


def _slowest(seconds: float) -> float:
    """The group waits for the last one."""
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


class _Training:
    """A small network on noise: what it learns does not matter here."""

    def __init__(self, *, wrapped: bool) -> None:
        bare = network()
        # All ranks have made the same model: to send it would take long on a slow link.
        self.model = DistributedDataParallel(bare, init_sync=False) if wrapped else bare
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        rng = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(BATCH, 784, generator=rng)
        self.labels = torch.randint(10, (BATCH,), generator=rng)

    def steps(self, count: int) -> tuple[float, float, float]:
        """The mean of so many steps."""
        parts = [self.step() for _ in range(count)]
        forward, backward, rest = (statistics.fmean(part) for part in zip(*parts, strict=True))
        return forward, backward, rest

    def step(self) -> tuple[float, float, float]:
        """Seconds forward, backward and for the rest."""
        marks = [time.perf_counter()]
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(self.images), self.labels)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        marks.append(time.perf_counter())
        return marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]


def _silent_hook() -> Callable[..., Any]:
    """Sends nothing. Without annotations: DDP refuses those that are strings."""

    def hook(state, bucket):  # pyright: ignore[reportUnknownParameterType, reportMissingParameterType]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(cast(dist.GradBucket, bucket).buffer())
        return done

    return cast("Callable[..., Any]", hook)


class Turn(NamedTuple):
    """The steps that are timed at once.

    Attributes:
        steps: a whole cycle of a schedule; several with a delay.
        first: steps before the first turn, so that no sync round is under way between two turns: it would go
            on while nothing is timed.
        before: steps before every turn. With a delay the first step of a turn waits for one of these.
    """

    steps: int
    first: int = 0
    before: int = 0


def turn_of(method: str) -> Turn:
    parsed = parse(method)
    if isinstance(parsed, Schedule):
        return Turn(parsed.period, first=parsed.delay)
    if isinstance(parsed, Exchange) and parsed.traits.delayed:
        return Turn(DELAYED_STEPS, before=1)
    return Turn(1)


def _measured(
    method: str, shapes: Shapes, link: Link
) -> tuple[predict.Compute, list[predict.Profile | predict.PeriodicProfile], float]:
    """Steps that send nothing, the method's work alone, and whole steps, by turns.

    By turns, because what else the machine does comes and goes. Methods for gradients are under DDP, also in
    the steps that send nothing, so that its copying of buckets counts.
    """
    from thinwire.hosts import attach

    scheduled, turn = isinstance(parse(method), Schedule), turn_of(method)
    silent, training = (_Training(wrapped=not scheduled) for _ in range(2))
    if not scheduled:
        cast(Any, silent.model).register_comm_hook(None, _silent_hook())
    session = attach(training.model, method, optimizer=training.optimizer)
    parts: list[tuple[float, float, float]] = []
    profiles: list[predict.Profile | predict.PeriodicProfile] = []
    taken: list[float] = []
    spent = 0.0
    turns = 0
    for _ in range(turn.first):
        training.step()
    while len(taken) < MOST_TURNS and (len(taken) < LEAST_TURNS or spent < SECONDS):
        dist.barrier()
        alone = silent.steps(turn.steps)
        slowed = _slowest(sum(alone)) / sum(alone)
        profile = _profile(method, shapes, link)
        dist.barrier()
        for _ in range(turn.before):
            training.step()
        whole = _slowest(sum(training.steps(turn.steps)))
        session.wait()
        if turns >= WARM_UP:
            parts.append((alone[0] * slowed, alone[1] * slowed, alone[2] * slowed))
            profiles.append(profile)
            taken.append(whole)
            spent += turn.steps * whole
        turns += 1
    session.detach()
    compute = predict.Compute(*(statistics.median(part) for part in zip(*parts, strict=True)))
    return compute, profiles, statistics.median(taken)


def _profile(method: str, shapes: Shapes, link: Link) -> predict.Profile | predict.PeriodicProfile:
    size = dist.get_world_size()
    if isinstance(parse(method), Schedule):
        return predict.periodic_profile(method, shapes, size, link=link, repeats=1)
    return predict.profile(method, shapes, size, link=link, repeats=1)
