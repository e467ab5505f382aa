"""How the bytes that a worker receives grow with the number of workers, by simulated steps."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.scale import measure
from reproductions.base import Context, Outcome
from thinwire.net.costs import Link

WORKERS = (4, 16, 64, 256)
ENTRIES = 100_000


def worker_counts(context: Context) -> tuple[int, ...]:
    return WORKERS[:2] if context.quick else WORKERS


def received(context: Context, methods: Sequence[str], done: int, total: int) -> dict[str, list[int]]:
    """Bytes a step of each method at each of `worker_counts`; `done` of `total` parts are finished before."""
    found: dict[str, list[int]] = {method: [] for method in methods}
    for number, workers in enumerate(worker_counts(context)):
        context.progress(f"cost at {workers} workers", done + number, total)
        for method, own in found.items():
            key = f"cost {method} {workers} {ENTRIES}"
            one = context.once(key, lambda m=method, w=workers: measure(m, w, ENTRIES, Link()).received_bytes)
            own.append(one)
    return found


def tabulate(context: Context, outcome: Outcome, found: dict[str, list[int]]) -> None:
    outcome.table(
        f"bytes received per worker and step, {ENTRIES:,} entries",
        ("method", *map(str, worker_counts(context))),
        [(method, *(f"{value:,}" for value in values)) for method, values in found.items()],
    )
