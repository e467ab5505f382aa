"""What `thinwire run` costs over a session that the script attaches itself.

Two models with the same method take turns in the same processes: one is attached by hand, one by the host of
`thinwire run`, with its count of optimizer steps.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Progress, Trainers, deep_mlp, from_rank_0, measuring, median_ratio, show
from thinwire.hosts import attach
from thinwire.hosts.scripts import ScriptHost
from thinwire.net.launch import Worker, run_local
from thinwire.tools.cli.show import JsonFile, save
from thinwire.tools.script.clock import Clock

METHODS = ("dense", "topk(ratio=0.01)")
TARGET = 1.02
BY_HAND, RUN = "attached by hand", "thinwire run"


@dataclass(frozen=True)
class Cost:
    """Median step times with one method."""

    method: str
    milliseconds: dict[str, float]
    ratio: float
    """Median over the rounds of the step time under `run` by that of the other model in the same round."""


def command(
    steps: Annotated[int, typer.Option(min=1, help="Rounds of one step of each of the two.")] = 200,
    json_file: JsonFile = None,
) -> None:
    """`thinwire run` against a session attached by hand, interleaved."""
    save(json_file, report(steps))


def report(steps: int) -> list[dict[str, Any]]:
    """Measure and show a table; returns the record for the JSON file."""
    with measuring(len(METHODS) * steps) as progress:
        results = run(steps, progress=progress)
    show(
        f"a step on 2 ranks, median of {steps}",
        results,
        {
            "method": lambda r: r.method,
            BY_HAND: lambda r: f"{r.milliseconds[BY_HAND]:.2f} ms",
            RUN: lambda r: f"{r.milliseconds[RUN]:.2f} ms",
            "ratio": lambda r: f"{r.ratio:.3f}",
            "target": lambda r: f"{TARGET:.2f}",
        },
    )
    return [{**asdict(r), "passed": r.ratio <= TARGET} for r in results]


def run(steps: int = 200, progress: Progress | None = None) -> list[Cost]:
    """One measurement per method; `progress` is called after every round."""
    on_report = from_rank_0(progress)
    return [run_local(_measure, 2, steps, method, on_report=on_report)[0] for method in METHODS]


class _Both(Trainers):
    """The clock counts only the steps of the model under `run`; to start and stop it is part of them."""

    host: ScriptHost

    def step(self, name: str) -> None:
        if name != RUN or not self.host.attached:
            super().step(name)
            return
        clock = Clock()
        clock.attached(self.host.attached[0])
        super().step(name)
        clock.close()


def _measure(worker: Worker, steps: int, method: str) -> Cost:
    by_hand = DistributedDataParallel(deep_mlp())
    with ScriptHost(method) as host:
        trainers = _Both({BY_HAND: by_hand, RUN: DistributedDataParallel(deep_mlp())}, worker.rank)
        trainers.host = host
        session = attach(by_hand, method, optimizer=trainers.optimizers[BY_HAND])
        seconds = trainers.rounds(
            steps, warm_up=max(5, steps // 10), done=lambda: worker.report(f"run with {method}")
        )
    if len(host.attached) != 1:
        raise RuntimeError(f"the host attached {len(host.attached)} models, not 1")
    session.detach()
    return Cost(
        method,
        {name: 1e3 * statistics.median(times) for name, times in seconds.items()},
        median_ratio(seconds[RUN], seconds[BY_HAND]),
    )
