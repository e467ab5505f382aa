"""What a whole step of each method costs without a network: `session.average` at world size 1, in copies.

Copy and steps are timed in turn, and the best of each counts: other processes only ever add to a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thinwire.methods.registry import list_methods, parse_exchange
from thinwire.net.launch import Worker, run_local

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


def run(
    chosen: Sequence[str] = (),
    size: int = DEFAULT_SIZE,
    repeats: int = 15,
    threads: int = 1,
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Time every method on one float32 tensor of `size` entries, a square matrix as nearly as possible."""

    def on_report(rank: int, method: str) -> None:
        if progress is not None:
            progress(method)

    strings = [str(parse_exchange(text)) for text in (chosen or list_methods())]
    return run_local(_measure, 1, strings, size, repeats, threads, timeout=3600, on_report=on_report)[0]


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
    copies: list[float] = []
    fresh: list[float] = []
    in_place: list[float] = []
    for turn in range(repeats + 2):
        took = [
            _seconds(lambda: copy.copy_(gradient)),
            _seconds(lambda: session.average({"weight": gradient})),
        ]
        work.copy_(gradient)
        took.append(_seconds(lambda: session.average({"weight": work}, in_place=True)))
        if turn >= 2:  # the first ones make states and workspaces
            for times, seconds in zip((copies, fresh, in_place), took, strict=True):
                times.append(seconds)
    session.detach()
    target = TARGETS.get(parse_exchange(method).name)
    return Row(method, min(fresh) / min(copies), min(in_place) / min(copies), target)


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
