"""The rendezvous store of torch.distributed: connections, waiting, and keys that are not needed any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed.distributed_c10d as c10d

PAUSE = 0.02
"""Seconds between two looks into the store."""


def default_store() -> Any:
    """The store of the default process group."""
    return c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def own_connection(store: Any) -> Any:
    """A connection of our own to the store: another thread may be waiting on the program's."""
    return store.clone() if hasattr(store, "clone") else store


def until(done: Callable[[], bool], seconds: float, stop: Callable[[], bool] | None = None) -> bool:
    """Ask again and again, soon at first, until it is done; False after so long, or if `stop` says so."""
    deadline = time.monotonic() + seconds
    pause = PAUSE / 10
    while not done():
        if time.monotonic() > deadline or (stop is not None and stop()):
            return False
        time.sleep(pause)
        pause = min(2 * pause, PAUSE)
    return True


def remove_by_last(store: Any, name: str, ranks: int, keys: Iterable[str]) -> None:
    """Each of the ranks calls this when it needs these keys no more; the last one removes them all."""
    done = f"{name}/done"
    if store.add(done, 1) == ranks:
        for key in (*keys, done):
            store.delete_key(key)
