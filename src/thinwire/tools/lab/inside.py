"""For code that runs inside a host: how to get in, and what the kernel has counted on its interface."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

from thinwire.tools.lab.namespaces import INTERFACE, Host, LabError

_NETWORK = 0x40000000  # CLONE_NEWNET


class Counters(NamedTuple):
    """Bytes that went over an interface, by the kernel's own count, headers included."""

    sent: int
    received: int


def enter(host: Host) -> None:
    """Move the calling thread, and those it starts from now on, into the host. There is no way back.

    To be called before a process group is made.
    """
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
    os.environ.update(host.environment())


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
