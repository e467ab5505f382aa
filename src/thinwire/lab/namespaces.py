"""Several "hosts" on one machine: Linux network namespaces joined through a bridge.

Every host has a kernel interface of its own, with counters that count what really goes over it and, if
wanted, a token bucket that makes it slow. The bridge lives in a namespace too, so the machine's own network
is not touched, and all is gone when the context ends. Needs root and iproute2's `ip` (and `tc`) command.

    with network(2, rate="100mbit") as hosts:
        hosts[0].start([sys.executable, "train.py"])
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

INTERFACE = "eth0"
_numbers = itertools.count()


class LabError(RuntimeError):
    """A command that sets up the network failed; the text has its own words."""


@dataclass
class Host:
    """One namespace: its name, its address on the bridge, and the processes started in it."""

    name: str
    address: str
    interface: str = INTERFACE
    processes: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Run a command inside the host, with its output in pipes; killed when the network goes.

        gloo is told to use the host's interface.
        """
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={**os.environ, "GLOO_SOCKET_IFNAME": self.interface, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process


def unavailable() -> str | None:
    """Why this machine cannot do it, or None if it can."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the `ip` command (iproute2)"
    probe = f"tw{os.getpid()}probe"
    try:
        _ip("netns", "add", probe)
    except LabError as error:
        return f"this kernel or container does not allow network namespaces: {error}"
    try:
        _ip("-n", probe, "link", "add", "eth0", "type", "veth", "peer", "name", "port0")
        _ip("-n", probe, "link", "add", "hub", "type", "bridge")
    except LabError as error:
        return f"this kernel or container lacks veth or bridge devices: {error}"
    finally:
        _ip("netns", "del", probe)
    return None


@contextmanager
def network(hosts: int, *, rate: str | None = None, burst: str = "64kb") -> Generator[list[Host], None, None]:
    """`hosts` hosts, each with one interface to a common bridge.

    Args:
        hosts: how many, up to 250.
        rate: what an interface may send and receive, in the words of `tc` ("100mbit"); None: no limit.
        burst: the token bucket's depth.
    """
    if not 1 <= hosts <= 250:
        raise ValueError(f"from 1 to 250 hosts, not {hosts}")
    prefix = f"tw{os.getpid()}n{next(_numbers)}"
    hub = f"{prefix}hub"
    made: list[str] = []
    members = [Host(f"{prefix}h{number}", f"10.77.0.{number + 1}") for number in range(hosts)]
    try:
        for name in (hub, *(host.name for host in members)):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "hub", "type", "bridge")
        _ip("-n", hub, "link", "set", "hub", "up")
        for number, host in enumerate(members):
            _join(host, hub, f"port{number}", rate, burst)
        yield members
    finally:
        for host in members:
            for process in host.processes:
                if process.poll() is None:
                    process.kill()
                process.communicate()
        for name in made:
            _ip("netns", "del", name)


def _join(host: Host, hub: str, port: str, rate: str | None, burst: str) -> None:
    inside = ("-n", host.name)
    _ip(*inside, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", hub)
    _ip(*inside, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _ip(*inside, "link", "set", INTERFACE, "up")
    _ip("-n", hub, "link", "set", port, "master", "hub", "up")
    if rate is not None:
        for name, device in ((host.name, INTERFACE), (hub, port)):
            limit = ("rate", rate, "burst", burst, "latency", "400ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limit)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
