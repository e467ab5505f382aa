"""Words that the ranks exchange through the rendezvous store, beside the collectives.

A collective needs every rank in the same order; a rank that failed on the way would leave the others waiting.
Through the store a rank that cannot go on says so in place of its answer, and a background thread can take
part while the training goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from thinwire.errors import PeerError
from thinwire.net.liveness import timeout_of
from thinwire.net.store import default_store, own_connection, remove_by_last, until


class Bulletin:
    """The ranks of one group. Every rank makes the same calls, each with a subject of its own.

    Args:
        group: the ranks.
        name: equal on all ranks, and never used before in this process group.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._me = group.rank()
        self._prefix = f"thinwire/bulletin/{name}"
        store = self._home = default_store()  # kept, because this rank may be its host
        # A connection of its own: another thread may be waiting on the program's.
        self._store: Any = own_connection(store)
        self.timeout = timeout_of(group).total_seconds()

    def say(self, subject: str, text: str) -> None:
        """This rank's answer, without waiting for the others'."""
        try:
            self._store.set(self._key(subject, self._me), text)
        except RuntimeError as error:
            raise self._no_store(subject) from error

    def hear(self, subject: str, *, stop: Callable[[], bool] | None = None) -> list[str]:
        """The answers of all ranks; PeerError names those that are silent until the timeout, or `stop`."""
        said: dict[int, str] = {}
        keys = [self._key(subject, rank) for rank in range(len(self._ranks))]

        def all_heard() -> bool:
            for rank in range(len(self._ranks)):
                if rank not in said and self._store.check([keys[rank]]):
                    said[rank] = bytes(self._store.get(keys[rank])).decode()
            return len(said) == len(self._ranks)

        try:
            complete = until(all_heard, self.timeout, stop)
        except RuntimeError as error:
            raise self._no_store(subject) from error
        if not complete:
            names = ", ".join(str(self._ranks[rank]) for rank in range(len(self._ranks)) if rank not in said)
            raise PeerError(
                f"{subject} failed on rank {self._ranks[self._me]}: no word from rank {names}: dead, "
                "stalled or gone another way. Every rank must take part"
            )
        with contextlib.suppress(RuntimeError):
            remove_by_last(self._store, f"{self._prefix}/{subject}", len(self._ranks), keys)
        return [said[rank] for rank in range(len(self._ranks))]

    def until_heard(self, subject: str, *, stop: Callable[[], bool]) -> None:
        """Wait until all ranks have heard it, or the timeout, or `stop`: this rank may keep the store."""
        with contextlib.suppress(RuntimeError):
            until(lambda: not self._store.check([self._key(subject, self._me)]), self.timeout, stop)

    def _key(self, subject: str, rank: int) -> str:
        return f"{self._prefix}/{subject}/{rank}"

    def _no_store(self, subject: str) -> PeerError:
        return PeerError(
            f"{subject} failed on rank {self._ranks[self._me]}: the rendezvous store does not answer: its "
            "host (usually rank 0) is gone"
        )

    def all(self, subject: str, text: str) -> list[str]:
        """Say this, and hear what all ranks say, this one included, in the order of ranks."""
        self.say(subject, text)
        return self.hear(subject)
