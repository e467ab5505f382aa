"""What checksums cost: the share of sealing and verifying frames in a step.

Every block of a checksum is timed where it is added, and the sum is divided by the time of the same step:
what disturbs the machine disturbs both. The steps are those of `methods` (in one process, without a network)
and of `overhead` (DDP on two ranks). DDP's exchange runs during the backward pass, so the
share there is an upper bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Progress, Size, Trainers, deep_mlp, from_rank_0, measuring, seconds, show
from benchmarks.methods import DEFAULT_SIZE
from thinwire.methods.registry import list_methods, parse_exchange
from thinwire.net import frames
from thinwire.net.launch import Worker, run_local
from thinwire.tools.cli.show import JsonFile, Methods, save

BAR = 2.0
"""Percent of a step that checksums may take."""
ALONE, DDP = "session.average", "DDP, 2 ranks"
UNDER_DDP = ("dense", "topk(ratio=0.01)", "qsgd(bits=4)", "powersgd(rank=4)")


@dataclass(frozen=True)
class Row:
    """One method: the medians over its steps."""

    step: str
    method: str
    milliseconds: float
    blocks: float
    """Blocks that are added to checksums, per step."""
    percent: float

    @property
    def passed(self) -> bool:
        return self.percent <= BAR


class Stopwatch:
    """Times every block that is added to a checksum; lanes do it in threads of their own."""

    def __init__(self) -> None:
        self._times: list[float] = []
        plain = frames.Checksum.add_until

        def timed(checksum: frames.Checksum, end: int) -> None:
            began = time.perf_counter()
            plain(checksum, end)
            self._times.append(time.perf_counter() - began)

        frames.Checksum.add_until = timed  # pyright: ignore[reportAttributeAccessIssue]

    def of(self, step: Callable[[], object]) -> tuple[float, float, int]:
        """The seconds of a step, those of its checksums, and their number."""
        self._times.clear()
        took = seconds(step)
        return took, sum(self._times), len(self._times)


def command(
    size: Size = DEFAULT_SIZE,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each method.")] = 50,
    method: Methods = None,
    json_file: JsonFile = None,
) -> None:
    """The share of checksums in a step, in one process and under DDP."""
    save(json_file, report(size, steps, method or ()))


def report(size: int, steps: int, chosen: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Measure and show a table; returns the record for the JSON file."""
    wrapped = [cls().traits.two_levels or cls().traits.delayed for cls in list_methods().values()]
    one_level = [name for name, other in zip(list_methods(), wrapped, strict=True) if not other]
    alone, under_ddp = ([str(parse_exchange(m)) for m in chosen or some] for some in (one_level, UNDER_DDP))
    with measuring(len(alone) + len(under_ddp)) as progress:
        results = run(alone, under_ddp, size, steps, progress)
    show(
        f"checksums in a step, of {size:,} entries or of a 2.6 M-parameter MLP (bar: {BAR:g} %)",
        results,
        {
            "step": lambda r: r.step,
            "method": lambda r: r.method,
            "time": lambda r: f"{r.milliseconds:.2f} ms",
            "blocks": lambda r: f"{r.blocks:g}",
            "share": lambda r: f"{r.percent:.2f} %{'' if r.passed else ' (missed)'}",
        },
    )
    return [{**asdict(r), "passed": r.passed} for r in results]


def run(
    alone: Sequence[str], under_ddp: Sequence[str], size: int, steps: int, progress: Progress | None = None
) -> list[Row]:
    """A row for every method, first those without a network."""
    on_report = from_rank_0(progress)
    rows = run_local(_alone, 1, alone, size, steps, timeout=3600, on_report=on_report)[0]
    return rows + run_local(_under_ddp, 2, under_ddp, steps, timeout=3600, on_report=on_report)[0]


def _alone(worker: Worker, methods: Sequence[str], size: int, steps: int) -> list[Row]:
    from thinwire.sessions.gradient import Session

    torch.set_num_threads(1)
    columns = max(1, int(size**0.5))
    gradient = torch.randn(max(1, size // columns), columns, generator=torch.Generator().manual_seed(0))
    watch, rows = Stopwatch(), list[Row]()
    for method in methods:
        worker.report(method)
        session = Session([("weight", gradient)], method)
        found = [watch.of(lambda own=session: own.average({"weight": gradient})) for _ in range(2 + steps)]
        session.detach()
        rows.append(_row(ALONE, method, found[2:]))  # the first make states and workspaces
    return rows


def _under_ddp(worker: Worker, methods: Sequence[str], steps: int) -> list[Row]:
    from thinwire.hosts import attach

    models = {method: DistributedDataParallel(deep_mlp()) for method in methods}
    for method, model in models.items():
        attach(model, method)
    trainers, watch = Trainers(models, worker.rank), Stopwatch()
    found: dict[str, list[tuple[float, float, int]]] = {method: [] for method in methods}
    for number in range(5 + steps):
        for method in methods:
            measured = watch.of(lambda name=method: trainers.step(name))
            if number >= 5:
                found[method].append(measured)
    for method in methods:
        worker.report(method)
    return [_row(DDP, method, each) for method, each in found.items()]


def _row(step: str, method: str, found: Sequence[tuple[float, float, int]]) -> Row:
    took, _, counts = zip(*found, strict=True)
    share = statistics.median(checksums / whole for whole, checksums, _ in found)
    return Row(step, method, 1e3 * statistics.median(took), statistics.mean(counts), 100 * share)
