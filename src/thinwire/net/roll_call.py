"""Who is there: after a failure every rank's process is asked, and a thread of its own answers.

Only some ranks notice a death at once; the others notice that those have left, and would blame them. So
nobody guesses. The first to notice calls all ranks, through the store. A thread of each rank answers what the
rank is doing, however busy its training is. Who does not answer is dead or stopped. The first to know writes
the verdict, and all ranks keep it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any, cast

import torch.distributed.distributed_c10d as c10d

from thinwire.net import torchrun
from thinwire.net.store import default_store, own_connection, remove_by_last, until

GRACE_SECONDS = 3.0
"""How long the called ranks have to answer."""
# A call may come any time; the store counts milliseconds in 32 bits.
_LONG = timedelta(days=20)
# How far apart two ranks of a machine come out of the same attach.
_ATTACHING_SECONDS = 60.0
# Of the thread that leaves: the store may be in a process that is stopped.
_LEAVING_SECONDS = 2.0


@dataclass(frozen=True)
class Answer:
    """What a rank was doing when it was called: an operation, or None, and for how long; or it has left."""

    operation: str | None
    seconds: float = 0.0
    steps: int = 0
    """So far, in the session."""
    left: bool = False


Answers = dict[int, Answer | None]
"""By rank; None did not answer."""


class RollCall:
    """This rank's part in the roll call of one session.

    Args:
        session: the name of its first process group.
        rank: this rank, in that group.
        ranks: the numbers of the group's ranks in the world.
        steps: how many steps the session has taken so far.
    """

    def __init__(self, session: str, rank: int, ranks: Sequence[int], steps: Callable[[], int]) -> None:
        self._session = session
        self._rank = rank
        self._ranks = list(ranks)
        self._size = len(ranks)
        self._steps = steps
        self._prefix = f"thinwire/roll call/{session}"
        self.under_way: dict[object, tuple[str, str, float]] = {}
        """The operations under way, oldest first: each one's name, what it is of, and when it began."""
        self._verdict: Answers | None = None
        self._closed = False
        kinds = ("here", "call", "heard", "process")
        mine = [self._key(kind, rank) for kind in kinds for rank in range(self._size)]
        self.keys = {self._prefix: (self._size, [*mine, f"{self._prefix}/verdict"])}
        """What the last rank removes from the store when it leaves: by name, for how many ranks it counts."""
        self._watch: torchrun.Watch | None = None
        # One connection waits for a call. The other one speaks, also when the process group is gone.
        self._speaking = own_connection(default_store())
        if self._size == 1:
            return
        self._waiting = own_connection(default_store())
        self._thread = threading.Thread(target=self._listen, name="thinwire-roll-call", daemon=True)
        self._thread.start()
        self._begin_to_watch()
        # Not by `atexit`, which a process of multiprocessing leaves out.
        self._at_exit = Finalize(None, self.close, exitpriority=0)

    # -- what this rank does ---------------------------------------------------------------------------

    def _doing(self) -> Answer:
        if self._session not in list(cast(Any, c10d)._world.pg_names.values()):  # the program destroyed it
            return Answer(None, steps=self._steps(), left=True)
        for operation, of, begin in list(self.under_way.values()):  # the oldest
            return Answer(f"{operation} of {of}", time.monotonic() - begin, self._steps())
        return Answer(None, steps=self._steps())

    # -- the call --------------------------------------------------------------------------------------

    def answers(self) -> Answers | None:
        """The verdict: what all ranks answered to the first call; None if the store does not answer."""
        if self._verdict is None and not self._closed and self._size > 1:
            calling = threading.Thread(target=self._call, name="thinwire-diagnosis", daemon=True)
            calling.start()
            calling.join(GRACE_SECONDS + 2.0)
        return self._verdict

    def _call(self) -> None:
        with contextlib.suppress(RuntimeError):  # includes torch's DistError: the store's host has left
            store = self._speaking
            store.set(self._key("here", self._rank), _text(self._doing()))
            for rank in range(self._size):
                store.set(self._key("call", rank), "")
            found: Answers = {}
            until(lambda: self._collect(store, found), GRACE_SECONDS)
            record = json.dumps([_plain(found.get(rank)) for rank in range(self._size)])
            written = store.compare_set(f"{self._prefix}/verdict", "", record)
            self._settle(bytes(written))
            # The store may be in this process, which may end now: first let the others read it.
            present = [rank for rank, answer in found.items() if answer and not answer.left]
            until(lambda: store.check([self._key("heard", rank) for rank in present]), 1.0)

    def _collect(self, store: Any, found: Answers) -> bool:
        for rank in range(self._size):
            key = self._key("here", rank)
            if rank not in found and store.check([key]):
                found[rank] = _answer(bytes(store.get(key)))
        return len(found) == self._size

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):
            store = self._waiting
            store.wait([self._key("call", self._rank)], _LONG)
            if self._closed:
                return
            if not store.check([self._key("here", self._rank)]):
                store.set(self._key("here", self._rank), _text(self._doing()))
            verdict = f"{self._prefix}/verdict"
            if until(lambda: store.check([verdict]), GRACE_SECONDS + 2.0):
                self._settle(bytes(store.get(verdict)))
            store.set(self._key("heard", self._rank), "")

    def _settle(self, text: bytes) -> None:
        self._verdict = _verdict(text, self._size)
        answers = (self._verdict or {}).items()
        dead = [self._ranks[rank] for rank, answer in answers if answer is None and rank != self._rank]
        torchrun.tell(dead, "does not answer: dead, stopped or cut off")

    # -- the other ranks on this machine ---------------------------------------------------------------

    def _begin_to_watch(self) -> None:
        near = torchrun.neighbours()
        others = [r for r, world in enumerate(self._ranks) if world in near and r != self._rank]
        if others:
            self._speaking.set(self._key("process", self._rank), str(os.getpid()))
            self._watch = torchrun.Watch(lambda: self._processes(others), self._has_ended)

    def _processes(self, ranks: Sequence[int]) -> dict[int, int]:
        store, keys = self._speaking, [self._key("process", rank) for rank in ranks]
        with contextlib.suppress(RuntimeError):
            if until(lambda: store.check(keys), _ATTACHING_SECONDS, stop=lambda: self._closed):
                return {rank: int(store.get(key)) for rank, key in zip(ranks, keys, strict=True)}
        return {}

    def _has_ended(self, rank: int, status: int | None) -> None:
        """The process of a rank on this machine has ended; unless that was in order, call all others."""
        in_order = status in torchrun.IN_ORDER or (not torchrun.killed(status) and self._has_left(rank))
        if self._closed or in_order:
            return
        torchrun.tell([self._ranks[rank]], torchrun.described(status))
        with contextlib.suppress(RuntimeError):
            self._speaking.set(self._key("here", rank), _text(None))
            self.answers()

    def _has_left(self, rank: int) -> bool:
        """Whether a rank left a note; also if nobody can tell."""
        store, key = self._speaking, self._key("here", rank)
        try:
            answer = _answer(bytes(store.get(key))) if store.check([key]) else None
        except RuntimeError:
            return True
        return answer is not None and answer.left

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave: a later call finds a note about it. The threads end."""
        if self._closed:
            return
        self._closed = True
        if self._size > 1:
            self._at_exit.cancel()
        if self._watch is not None:
            self._watch.close()
        leaving = threading.Thread(target=self._leave, name="thinwire-leaving", daemon=True)
        leaving.start()
        leaving.join(_LEAVING_SECONDS)

    def _leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            store = self._speaking
            if self._size > 1:
                here = self._key("here", self._rank)
                if not store.check([here]):
                    store.set(here, _text(Answer(None, steps=self._steps(), left=True)))
                store.set(self._key("call", self._rank), "")
                self._thread.join(1.0)
            for name, (ranks, keys) in self.keys.items():
                remove_by_last(store, name, ranks, keys)

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"


def _plain(answer: Answer | None) -> dict[str, Any] | None:
    return None if answer is None else vars(answer)


def _text(answer: Answer | None) -> str:
    return json.dumps(_plain(answer))


def _answer(text: bytes) -> Answer | None:
    """An answer from the store; one that cannot be read counts as a sign of life."""
    try:
        given = json.loads(text)
    except ValueError:
        return Answer(None)
    return None if given is None else _checked(given) or Answer(None)


def _verdict(text: bytes, size: int) -> Answers | None:
    try:
        given = json.loads(text)
    except ValueError:
        return None
    if not isinstance(given, list) or len(cast("list[Any]", given)) != size:
        return None
    return {rank: _checked(one) for rank, one in enumerate(cast("list[Any]", given))}


def _checked(given: object) -> Answer | None:
    match given:
        case {
            "operation": str() | None as operation,
            "seconds": float() as seconds,
            "steps": int() as steps,
            "left": bool() as left,
        }:
            return Answer(operation, seconds, steps, left)
        case _:
            return None
