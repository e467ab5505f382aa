"""How much every kernel costs, in copies of the same float32 tensor.

Copy and kernel are timed in turn, many times, and the best of each counts: other processes only ever add to
a time. With one thread it is the thread's processor time, so waiting for a core does not count; with several
it is the time on the clock. Below about 1e7 entries the copy stays in the cache and every ratio looks worse
than it is.

With several threads, a kernel right after an operation of torch can take as long as with one thread, or
longer; torch's OpenMP threads still spinning on the cores would explain that, and OMP_WAIT_POLICY=passive
shortens it. Here both wait a while and run once before they are timed: the figures are those of a steady
state.

On a GPU (`--device cuda`) a time ends when the device has done everything that was queued.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import (
    ONE_COPY,
    Action,
    Progress,
    Size,
    Threads,
    measuring,
    seconds,
    show,
    target,
    threads_of_torch,
)
from benchmarks.kernel_cases import CASES, Case, nothing
from benchmarks.side_effects import show_side_effects
from thinwire import kernels
from thinwire.tools.cli.show import JsonFile, save
from thinwire.tools.devices import DeviceOption, Name, checked, finish, of_rank

DEFAULT_SIZE = 10_000_000
SPINNING = 0.02
"""Seconds after which torch's OpenMP threads have certainly stopped waiting for work on a core."""
REFERENCE_SIZE = 1_000_000
"""The torch reference needs up to 400 copies: the ratio to it is taken at this size at most."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel: copies of the tensor, GB of float32 input per second, how many times faster than torch."""

    name: str
    copies: float
    gb_per_s: float
    reference_ratio: float
    target: float | None


def command(
    size: Size = DEFAULT_SIZE,
    threads: Threads = 1,
    device: DeviceOption = "cpu",
    only: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Every kernel in copies of the same tensor, in GB/s, and against its torch reference."""
    save(json_file, report(size, threads, only, device))


def report(size: int, threads: int, only: str = "", device: Name = "cpu") -> list[dict[str, Any]]:
    """Measure and show tables; returns the record for the JSON file."""
    with measuring(len(_chosen(only))) as progress:
        results = run(size, threads, progress, only=only, device=checked(device))
    where = f"{threads} thread{'s' * (threads > 1)}" if device == "cpu" else torch.cuda.get_device_name()
    show(
        f"kernels, {size:,} entries, {where} ({ONE_COPY})",
        results,
        {
            "kernel": lambda r: r.name,
            "copies": lambda r: f"{r.copies:.2f}",
            "target": lambda r: target(r.target),
            "GB/s": lambda r: f"{r.gb_per_s:.1f}",
            "faster than torch": lambda r: f"{r.reference_ratio:.1f} x",
        },
    )
    if not only and device == "cpu":
        show_side_effects(size)
    return [asdict(r) for r in results]


def run(
    size: int = DEFAULT_SIZE,
    threads: int = 1,
    progress: Progress | None = None,
    repeats: int = 15,
    only: str = "",
    device: Name = "cpu",
) -> list[Row]:
    """Time every kernel whose name contains `only`, with `threads` threads of torch and as many of ours."""
    rows: list[Row] = []
    # Every tensor of a case is made on the default device.
    default = nullcontext() if device == "cpu" else of_rank(device)
    with threads_of_torch(threads), default:
        for case in _chosen(only):
            if progress is not None:
                progress(case.name)
            rows.append(_measure(case, size, repeats, of_rank(device)))
    return rows


def _chosen(only: str) -> list[Case]:
    return [case for case in CASES if only in case.name]


def _measure(case: Case, size: int, repeats: int, device: torch.device) -> Row:
    action, reset = case.make(size)
    source, to = torch.randn(size), torch.zeros(size)
    reset()
    action()  # whatever compiles or allocates for the first time does it here
    copy, kernel = math.inf, math.inf
    for _ in range(repeats):
        copy = min(copy, _steady_seconds(lambda: to.copy_(source), nothing, device))
        kernel = min(kernel, _steady_seconds(action, reset, device))
    return Row(
        name=case.name,
        copies=kernel / copy,
        gb_per_s=4 * size / kernel / 1e9,
        reference_ratio=_reference_ratio(case, min(size, REFERENCE_SIZE), device),
        target=case.target,
    )


def _steady_seconds(action: Action, reset: Action, device: torch.device) -> float:
    if device.type == "cuda":
        reset()
        finish(device)
        return seconds(_to_the_end(action, device))
    if torch.get_num_threads() == 1:
        reset()
        return seconds(action, time.thread_time)
    time.sleep(SPINNING)
    with threads_of_torch(1):  # so that no OpenMP thread spins afterwards
        reset()
    action()
    with threads_of_torch(1):
        reset()
    return seconds(action)


def _to_the_end(action: Action, device: torch.device) -> Action:
    """The action and what it has queued on a GPU."""

    def complete() -> None:
        action()
        finish(device)

    return complete


def _reference_ratio(case: Case, size: int, device: torch.device) -> float:
    action, reset = case.make(size)
    action = _to_the_end(action, device)

    def best(repeats: int) -> float:
        times: list[float] = []
        for _ in range(repeats):
            reset()
            finish(device)
            times.append(seconds(action))
        return min(times)

    fast = best(5)
    with kernels.use_reference():
        return best(2) / fast
