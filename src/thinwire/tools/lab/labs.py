"""Labs that stay: built by one command, used by others, removed by a last one. Also finds what was left over.

Nothing is written down anywhere: the kernel knows the namespaces, and their names say whose they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.net.link import Links
from thinwire.tools.lab import namespaces as ns
from thinwire.tools.lab.namespaces import INTERFACE, PREFIX, Host, LabError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_OURS = re.compile(
    rf"{PREFIX}(?P<lab>p(?P<process>\d+)\.(?P<start>\d+)-\d+|[a-z][a-z0-9_]*)-(?:h(?P<host>\d+)|hub|probe)"
)
GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class Lab:
    """Namespaces that belong together. `owner` is the process that will remove them, if it lives."""

    name: str
    names: tuple[str, ...]
    hosts: tuple[str, ...]
    standing: bool
    owner: int | None


@dataclass(frozen=True)
class HostState:
    """A host as it is now; rates in bits per second (None: no limit), bytes by the kernel's count."""

    host: int
    namespace: str
    address: str
    up: int | None
    down: int | None
    sent: int
    received: int
    processes: tuple[int, ...]


def find() -> list[Lab]:
    """All labs of this machine, those that were left over included."""
    found: dict[str, list[re.Match[str]]] = {}
    for name in ns.namespaces():
        match = _OURS.fullmatch(name)
        if match:
            found.setdefault(match["lab"], []).append(match)
    return [_lab(name, matches) for name, matches in sorted(found.items())]


def _lab(name: str, matches: Sequence[re.Match[str]]) -> Lab:
    first = matches[0]
    hosts = sorted((int(match["host"]), match[0]) for match in matches if match["host"])
    owner = None
    if first["process"] and ns.start_of(int(first["process"])) == first["start"]:
        owner = int(first["process"])
    names = tuple(match[0] for match in matches)
    return Lab(name, names, tuple(host for _, host in hosts), first["process"] is None, owner)


def up(name: str, hosts: int, links: str | Links) -> list[Host]:
    """Build a lab that stays until `down`."""
    if not _NAME.fullmatch(name) or _OURS.fullmatch(f"{PREFIX}{name}-hub") is None:
        raise ConfigError(f"a lab's name is a lower-case word of up to 32 letters and digits, not {name!r}")
    if any(lab.name == name for lab in find()):
        raise ConfigError(f"lab {name!r} is there already: `thinwire lab down --name {name}` removes it")
    return ns.build(f"{PREFIX}{name}-", hosts, links)


def get(name: str) -> list[Host]:
    """The hosts of a lab that stays."""
    for lab in find():
        if lab.standing and lab.name == name:
            return [Host(host, ns.address_of(number)) for number, host in enumerate(lab.hosts)]
    raise ConfigError(f"there is no lab {name!r}: build it with `thinwire lab up --name {name}`")


def down(name: str | None = None) -> list[Lab]:
    """Remove a lab or, without a name, all that stay and all whose process is gone; returns what was removed.

    A lab in use by the process that built it is left alone: it goes with that process.
    """
    chosen = [lab for lab in find() if (lab.name == name if name else lab.owner is None)]
    for lab in chosen:
        if lab.owner is not None:
            raise ConfigError(
                f"lab {name!r} belongs to process {lab.owner}, which is running: end that first"
            )
    if name and not chosen:
        raise ConfigError(f"there is no lab {name!r}; `thinwire lab status` lists those that are there")
    for lab in chosen:
        _end_processes(lab)
        ns.remove(*lab.names)
    return chosen


def state(lab: Lab) -> list[HostState]:
    """What the kernel says about each host."""
    hub = f"{PREFIX}{lab.name}-hub"
    ports = _rates(hub) if hub in lab.names else {}
    return [
        HostState(
            number,
            host,
            ns.address_of(number),
            _rates(host).get(INTERFACE),
            ports.get(f"port{number}"),
            *_bytes(host),
            tuple(_processes(host)),
        )
        for number, host in enumerate(lab.hosts)
    ]


def _rates(namespace: str) -> dict[str, int]:
    """Bits per second of each interface that has a limit."""
    qdiscs = json.loads(ns.run("tc", "-j", "-n", namespace, "qdisc", "show") or "[]")
    return {one["dev"]: 8 * one["options"]["rate"] for one in qdiscs if one.get("kind") == "tbf"}


def _bytes(namespace: str) -> tuple[int, int]:
    try:
        (link,) = json.loads(ns.ip("-j", "-s", "-n", namespace, "link", "show", "dev", INTERFACE))
    except LabError:  # a leftover whose building was interrupted has no interface yet
        return 0, 0
    statistics = link["stats64"]
    return statistics["tx"]["bytes"], statistics["rx"]["bytes"]


def _processes(namespace: str) -> list[int]:
    return [int(word) for word in ns.ip("netns", "pids", namespace).split()]


def _end_processes(lab: Lab) -> None:
    """What runs inside was started there by thinwire: ask it to end, then make it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        inside = [process for name in lab.names for process in _processes(name)]
        for process in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        deadline = time.monotonic() + GRACE_SECONDS
        while inside and time.monotonic() < deadline:
            time.sleep(0.05)
            inside = [process for process in inside if ns.start_of(process) is not None]
        if not inside:
            return
