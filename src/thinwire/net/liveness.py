"""Which ranks are missing: when an operation fails, the ranks that notice report it in the group's store."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from thinwire.errors import PeerError

GRACE_SECONDS = 3.0


class Liveness:
    """Turns a failed operation into a `PeerError` that names the ranks that did not report."""

    def __init__(self, group: dist.ProcessGroup, session: str) -> None:
        self._rank = group.rank()
        self._size = group.size()
        self._ranks = dist.get_process_group_ranks(group)
        self._prefix = f"thinwire/reports/{session}"  # one for all lanes: a rank reports its first failure
        self.timeout = timeout_of(group)

    def diagnose(self, operation: str, error: BaseException) -> PeerError:
        """Report this rank's failure, wait briefly for the others' reports, and name the silent ranks."""
        known = self._reports(operation)
        if known is None:
            who = "the rendezvous store does not answer: its host (usually rank 0) is gone"
        else:
            silent = [self._ranks[r] for r in range(self._size) if r not in known and r != self._rank]
            heard = ", ".join(f"rank {self._ranks[r]} in {what}" for r, what in sorted(known.items()))
            if silent:
                names = ", ".join(str(rank) for rank in silent)
                who = f"no word from rank {names}: dead, stalled or gone another way"
                who += f" (also waiting: {heard})" if heard else ""
            elif all(what == operation for what in known.values()):
                who = "every rank reports this failure: one came later than the timeout, perhaps this one"
            else:
                who = f"every rank is alive, but they stopped in different operations: {heard}"
        cause = plain(str(error)) or type(error).__name__
        return PeerError(f"{operation} failed on rank {self._ranks[self._rank]}: {who}. Cause: {cause}")

    def _reports(self, operation: str) -> dict[int, str] | None:
        """The reports of the other ranks; None if the store does not answer."""
        known: dict[int, str] | None = None

        def ask() -> None:
            nonlocal known
            # torch's DistError is a RuntimeError: the store's host has left. ValueError: no group any more.
            with contextlib.suppress(RuntimeError, ValueError):
                known = self._exchange_reports(operation)

        asking = threading.Thread(target=ask, name="thinwire-diagnosis", daemon=True)
        asking.start()
        asking.join(GRACE_SECONDS + 2.0)
        return known

    def _exchange_reports(self, operation: str) -> dict[int, str]:
        store = _own_connection()
        store.set(f"{self._prefix}/{self._rank}", operation)
        known: dict[int, str] = {}
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and len(known) < self._size - 1:
            for rank in range(self._size):
                key = f"{self._prefix}/{rank}"
                if rank != self._rank and rank not in known and store.check([key]):
                    known[rank] = bytes(store.get(key)).decode()
            time.sleep(0.05)
        return known


def plain(text: str) -> str:
    """The first line of a gloo error message, without the source location and the advice after it."""
    line = text.strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\.(cc|h):\d+\] ", "", line).partition(" This is typically")[0].rstrip(". ")


def default_store() -> Any:
    return c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def _own_connection() -> Any:
    """A second connection to the default store: another thread may be waiting on the program's own."""
    store = default_store()
    return store.clone() if hasattr(store, "clone") else store


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout of the group, which the private groups use as well."""
    for name in ("cpu", "cuda"):
        try:
            import torch

            backend = cast(Any, group)._get_backend(torch.device(name))
            return cast(timedelta, backend.options._timeout)
        except (RuntimeError, AttributeError):
            continue
    return c10d.default_pg_timeout
