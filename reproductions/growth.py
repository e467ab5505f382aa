"""How the bytes that a worker receives grow with the number of workers, by simulated steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.scale import measure
from reproductions.base import Outcome
from reproductions.parts import Context
from thinwire.net.costs import Link

WORKERS = (4, 16, 64, 256)
ENTRIES = 100_000


def received_bytes(method: str, workers: int, entries: int) -> int:
    return measure(method, workers, entries, Link()).received_bytes


def received(context: Context, outcome: Outcome, methods: Sequence[str]) -> dict[str, dict[int, int]]:
    """Bytes that a worker receives in a step, by method and number of workers; and a table of them."""
    counts = WORKERS[:2] if context.quick else WORKERS
    found: dict[str, dict[int, int]] = {}
    for method in methods:
        parts = {workers: partial(received_bytes, method, workers, ENTRIES) for workers in counts}
        found[method] = context.each(parts, f"bytes of {method}, workers:")
    outcome.table(
        f"bytes received per worker and step, {ENTRIES:,} entries",
        ("method", *map(str, counts)),
        [(method, *(f"{value:,}" for value in own.values())) for method, own in found.items()],
    )
    return found


def factor(sizes: dict[int, int]) -> float:
    """From the fewest workers to the most."""
    return sizes[max(sizes)] / sizes[min(sizes)]
