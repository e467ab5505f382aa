"""The ranks of one replica group, if it has several.

Each rank has a manager, and averages with the rank of the same number in the other groups. The vote is one
for the whole group: all of its ranks commit a step, or none. But no operation between groups compares the
ranks of one group, and whole replicas must be equal on all of them. So they compare here, through the
group's store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from thinwire.errors import DisagreementError, PeerError
from thinwire.net.handshake import first_difference
from thinwire.net.store import until

MODEL = "model"


class GroupRanks:
    """This rank and the others of its group; every rank makes the same calls with the same `moment`.

    Args:
        manager: torchft's manager of this rank.
    """

    def __init__(self, manager: object) -> None:
        private = cast(Any, manager)
        self.rank: int = private._group_rank
        self.size: int = private._group_world_size
        self._store: Any = private._store
        # The vote waits for all ranks of the group: one that hears nothing here must still be in time for it.
        self._timeout: float = private._timeout.total_seconds() / 2
        self._said: list[str] = []

    def say(self, moment: str, settings: Mapping[str, Any] | None) -> None:
        """This rank's settings, without waiting for the others'; None if it has failed before this."""
        if self.size > 1:
            key = self._key(moment, self.rank)
            self._store.set(key, json.dumps(settings))
            self._said.append(key)

    def compare(self, moment: str) -> None:
        """Raise on every rank of the group if their settings differ."""
        if self.size == 1:
            return
        said = self._hear(moment)
        problem = _problem(said)
        if problem is not None:
            self._heard(moment)
            raise problem
        while len(self._said) > 1:  # all ranks have heard the ones before
            self._store.delete_key(self._said.pop(0))

    def _heard(self, moment: str) -> None:
        """All ranks are about to raise: rank 0, with whose process the store may end, is the last."""
        keys = [f"{self._key(moment, rank)}/heard" for rank in range(self.size)]
        self._store.set(keys[self.rank], "")
        if self.rank == 0:
            until(lambda: bool(self._store.check(keys)), self._timeout)

    def _hear(self, moment: str) -> Sequence[Mapping[str, Any] | None]:
        keys = [self._key(moment, rank) for rank in range(self.size)]
        if not until(lambda: bool(self._store.check(keys)), self._timeout):
            silent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise PeerError(f"no word from rank {', '.join(silent)} of this replica group: dead or stalled")
        return [json.loads(bytes(self._store.get(key))) for key in keys]

    def _key(self, moment: str, rank: int) -> str:
        return f"thinwire/ranks/{moment}/{rank}"


def _problem(said: Sequence[Mapping[str, Any] | None]) -> Exception | None:
    """What is wrong with what the ranks have said."""
    failed = [str(rank) for rank, settings in enumerate(said) if settings is None]
    if failed:
        return PeerError(f"rank {', '.join(failed)} of this replica group has failed")
    described = [cast("dict[str, Any]", one) for one in said]
    if any(one.get(MODEL) != described[0].get(MODEL) for one in described):
        return DisagreementError(
            "the ranks of this replica group have different models. Begin with the same seed in all "
            "groups, and average the gradients inside of each: wrap the model in "
            "DistributedDataParallel, or shard it with fully_shard, over the ranks of the group"
        )
    difference = first_difference(described, range(len(said)))
    if difference:
        return DisagreementError(
            f"the ranks of this replica group disagree on {difference}; set them up alike"
        )
    return None
