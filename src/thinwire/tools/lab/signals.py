"""Signals that end a process shall not leave a network behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def leaving_by(*numbers: signal.Signals) -> Generator[None, None, None]:
    """These signals raise `SystemExit` in the main thread, so that every `finally` is reached.

    Only the first one does: another shall not interrupt the cleaning up. Threads but the main one cannot
    set handlers; there nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
