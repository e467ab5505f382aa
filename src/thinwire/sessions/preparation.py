"""Kernels are compiled when a session begins, not in its first step, and never at import."""

from __future__ import annotations

import time
from collections.abc import Iterable

from thinwire import kernels, log
from thinwire.core.exchange import Exchange

# Loading from the cache takes less; only a compilation is worth a line.
QUIET_SECONDS = 4.0


def prepare_for(exchanges: Iterable[Exchange], *, loud: bool) -> None:
    """Compile (or load from the cache on disk) the CPU kernels that these exchanges use."""
    families = sorted({family for exchange in exchanges for family in exchange.kernel_families})
    begin = time.monotonic()

    def progress(family: str, done: int, total: int) -> None:
        elapsed = time.monotonic() - begin
        if loud and elapsed > QUIET_SECONDS:
            what = f"now {family}" if done < total else "kept on disk for later runs"
            log.info("%d of %d families of kernels ready after %.0f s, %s", done, total, elapsed, what)

    if families:
        kernels.prepare(progress, families)
