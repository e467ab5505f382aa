"""What a whole step of each method costs without a network: `session.average` at world size 1, in copies.

Copy and steps are timed in turn, and the best of each counts: other processes only ever add to a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.common import (
    ONE_COPY,
    Progress,
    Size,
    Threads,
    chosen_methods,
    from_rank_0,
    measuring,
    seconds,
    show,
    target,
)
from thinwire.core import Traits
from thinwire.methods.registry import list_methods, parse_exchange
from thinwire.net.launch import Worker, run_local
from thinwire.tools.cli.show import JsonFile, Methods, save

DEFAULT_SIZE = 10_000_000
# What a step may cost at most; for the other methods no target is set.
TARGETS = {"topk": 3.0, "qsgd": 4.0, "randomblock": 1.5}


@dataclass(frozen=True)
class Row:
    """One method: the time of a step in copies of the tensor, into a new tensor and in place."""

    method: str
    copies: float
    copies_in_place: float
    target: float | None


def command(
    size: Size = DEFAULT_SIZE, threads: Threads = 1, method: Methods = None, json_file: JsonFile = None
) -> None:
    """One `session.average` of every method at world size 1, in copies of the same tensor."""
    save(json_file, report(size, threads, chosen_methods(method)))


def report(size: int, threads: int, chosen: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Measure and show a table; returns the record for the JSON file."""
    with measuring(len(chosen or list_methods())) as progress:
        results = run(chosen, size, threads=threads, progress=progress)
    show(
        f"session.average at world size 1, {size:,} entries, in copies ({ONE_COPY})",
        results,
        {
            "method": lambda r: r.method,
            "into a new tensor": lambda r: f"{r.copies:.2f}",
            "in place": lambda r: f"{r.copies_in_place:.2f}",
            "target": lambda r: target(r.target),
        },
    )
    return [asdict(r) for r in results]


def run(
    chosen: Sequence[str] = (),
    size: int = DEFAULT_SIZE,
    repeats: int = 15,
    threads: int = 1,
    progress: Progress | None = None,
) -> list[Row]:
    """Time every method on one float32 tensor of `size` entries, a square matrix as nearly as possible."""
    timed = [name for name, cls in list_methods().items() if not _elsewhere(cls().traits)]
    strings = [str(parse_exchange(text)) for text in (chosen or timed)]
    on_report = from_rank_0(progress)
    return run_local(_measure, 1, strings, size, repeats, threads, timeout=3600, on_report=on_report)[0]


def _elsewhere(traits: Traits) -> bool:
    """Whether a session does more than run the exchange."""
    return traits.two_levels or traits.delayed


def _measure(worker: Worker, strings: Sequence[str], size: int, repeats: int, threads: int) -> list[Row]:
    torch.set_num_threads(threads)
    columns = max(1, int(size**0.5))
    gradient = torch.randn(max(1, size // columns), columns, generator=torch.Generator().manual_seed(0))
    copy = torch.empty_like(gradient)
    rows: list[Row] = []
    for method in strings:
        worker.report(method)
        rows.append(_time(method, gradient, copy, repeats))
    return rows


def _time(method: str, gradient: torch.Tensor, copy: torch.Tensor, repeats: int) -> Row:
    from thinwire.sessions.gradient import Session

    session = Session([("weight", gradient)], method)
    work = gradient.clone()
    times: list[tuple[float, float, float]] = []
    for _ in range(2 + repeats):
        copied = seconds(lambda: copy.copy_(gradient))
        fresh = seconds(lambda: session.average({"weight": gradient}))
        work.copy_(gradient)
        times.append((copied, fresh, seconds(lambda: session.average({"weight": work}, in_place=True))))
    session.detach()
    copied, fresh, in_place = map(min, zip(*times[2:], strict=True))  # the first make states and workspaces
    return Row(method, fresh / copied, in_place / copied, TARGETS.get(parse_exchange(method).name))
