"""For code that runs inside a host: what the kernel has counted on its interface."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from thinwire.tools.lab.namespaces import INTERFACE


class Counters(NamedTuple):
    """Bytes that went over an interface, by the kernel's own count, headers included."""

    sent: int
    received: int


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
