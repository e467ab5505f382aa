"""Who is there: after a failure every rank's process is asked, and a thread of its own answers.

Only some ranks notice a death at once; the others notice that those have left, and would blame them. So
nobody guesses. The first to notice calls all ranks, through the store. A thread of each rank answers what the
rank is doing, however busy its training is. Who does not answer is dead or stopped. The first to know writes
the verdict, and all ranks keep it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed.distributed_c10d as c10d

GRACE_SECONDS = 3.0
"""How long the called ranks have to answer."""
PAUSE = 0.02
"""Seconds between two looks into the store."""
# A call may come any time; the store counts milliseconds in 32 bits.
_LONG = timedelta(days=20)
_LEFT = "left"


@dataclass(frozen=True)
class Answer:
    """What a rank was doing when it was called: an operation, or None, and for how long; or it has left."""

    operation: str | None
    seconds: float = 0.0
    left: bool = False


Answers = dict[int, Answer | None]
"""By rank; None did not answer."""


class RollCall:
    """This rank's part in the roll call of one session."""

    def __init__(self, session: str, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._prefix = f"thinwire/roll call/{session}"
        self.under_way: dict[object, tuple[str, str, float]] = {}
        """The operations under way, oldest first: each one's name, what it is of, and when it began."""
        self._verdict: Answers | None = None
        self._closed = size == 1
        if self._closed:
            return
        # One connection waits for a call. The other one speaks, also when the process group is gone.
        self._waiting, self._speaking = _own_connection(), _own_connection()
        self._thread = threading.Thread(target=self._listen, name="thinwire-roll-call", daemon=True)
        self._thread.start()
        _open.add(self)

    # -- what this rank does ---------------------------------------------------------------------------

    def _doing(self) -> Answer:
        for operation, of, begin in list(self.under_way.values()):  # the oldest
            return Answer(f"{operation} of {of}", time.monotonic() - begin)
        return Answer(None)

    # -- the call --------------------------------------------------------------------------------------

    def answers(self) -> Answers | None:
        """The verdict: what all ranks answered to the first call; None if the store does not answer."""
        if self._verdict is None and not self._closed:
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
            found: Answers = dict.fromkeys(range(self._size))
            until(lambda: self._collect(store, found), GRACE_SECONDS)
            record = json.dumps([None if answer is None else vars(answer) for answer in found.values()])
            written = store.compare_set(f"{self._prefix}/verdict", "", record)
            self._verdict = _verdict(bytes(written), self._size)
            # The store may be in this process, which may end now: first let the others read it.
            present = [rank for rank, answer in found.items() if answer and not answer.left]
            until(lambda: store.check([self._key("heard", rank) for rank in present]), 1.0)

    def _collect(self, store: Any, found: Answers) -> bool:
        for rank, answer in found.items():
            key = self._key("here", rank)
            if answer is None and store.check([key]):
                found[rank] = _answer(bytes(store.get(key)))
        return None not in found.values()

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
                self._verdict = _verdict(bytes(store.get(verdict)), self._size)
            store.set(self._key("heard", self._rank), "")

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave: a later call finds a note about it. The thread ends."""
        if self._closed:
            return
        self._closed = True
        leaving = threading.Thread(target=self._leave, name="thinwire-leaving", daemon=True)
        leaving.start()
        leaving.join(1.0)
        self._thread.join(1.0)

    def _leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            store = self._speaking
            if not store.check([self._key("here", self._rank)]):
                store.set(self._key("here", self._rank), _LEFT)
            store.set(self._key("call", self._rank), "")

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"


_open: weakref.WeakSet[RollCall] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for each in list(_open):
        each.close()


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


def _text(answer: Answer) -> str:
    return json.dumps(vars(answer))


def _answer(text: bytes) -> Answer:
    """An answer from the store; one that cannot be read counts as a sign of life."""
    if text == _LEFT.encode():
        return Answer(None, left=True)
    try:
        return _checked(json.loads(text)) or Answer(None)
    except ValueError:
        return Answer(None)


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
        case {"operation": str() | None as operation, "seconds": float() as seconds, "left": bool() as left}:
            return Answer(operation, seconds, left)
        case _:
            return None


def default_store() -> Any:
    return c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def _own_connection() -> Any:
    """Another connection to the default store: another thread may be waiting on the program's own."""
    store = default_store()
    return store.clone() if hasattr(store, "clone") else store
