"""For code that runs inside a host: how to get in, and what the kernel has counted on its interface."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from thinwire.lab.namespaces import INTERFACE, Host, LabError

_NETWORK = 0x40000000  # CLONE_NEWNET
T = TypeVar("T")


class Counters(NamedTuple):
    """Bytes that went over an interface, by the kernel's own count, headers included."""

    sent: int
    received: int


def enter(host: Host) -> None:
    """Move the calling thread, and those it starts from now on, into the host. There is no way back.

    To be called before a process group is made.
    """
    _set_namespace(host)
    os.environ.update(host.environment())


def call_inside(host: Host, function: Callable[[], T]) -> T:
    """Call a function in a thread inside the host: sockets that it opens stay there, this thread does not."""

    def inside() -> T:
        _set_namespace(host)
        return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inside).result()


def _set_namespace(host: Host) -> None:
    try:
        handle = os.open(f"/run/netns/{host.name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(f"host {host.name} is not there: {error.strerror}") from error
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, _NETWORK):
            raise LabError(f"cannot enter host {host.name}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(handle)


def counters(interface: str = INTERFACE) -> Counters | None:
    """Of the host this thread is in; None outside of a host."""
    if "THINWIRE_HOST" not in os.environ:
        return None
    # Not below /sys, which shows the namespace that it was mounted in.
    return parse_counters(Path("/proc/thread-self/net/dev").read_text(), interface)


def parse_counters(text: str, interface: str) -> Counters | None:
    """One interface's line in a table such as /proc/net/dev."""
    for line in text.splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() == interface:
            columns = figures.split()
            return Counters(sent=int(columns[8]), received=int(columns[0]))
    return None
