"""Several "hosts" on one machine: Linux network namespaces joined through a bridge.

Every host has a kernel interface of its own, with counters of what really goes over it and, on request, a
token bucket that makes it slow. The bridge lives in a namespace too, so the machine's own network
is not touched, and all is gone when the context ends. Needs root and iproute2's `ip` (and `tc`) command.

    with network(2, rate="100mbit") as hosts:
        hosts[0].start([sys.executable, "train.py"])

Names say who made a namespace, so that leftovers can be recognised (see `labs.py`):
"thinwire-p<process>.<its start>-<number>-h0" belongs to a process, "thinwire-<name>-h0" to `thinwire lab up`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.errors import ConfigError, LabError
from thinwire.net.costs import Link
from thinwire.net.link import Links, parse

PREFIX = "thinwire-"
INTERFACE = "eth0"
MOST_HOSTS = 250
SMALLEST_BURST = 16 * 1024
BURST_SECONDS = 0.001
_NETWORK = 0x40000000  # CLONE_NEWNET
_numbers = itertools.count()


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
            env={**os.environ, **self.environment(), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def enter(self) -> None:
        """Move the calling thread, and those it starts from now on, into the host. There is no way back.

        To be called before a process group is made.
        """
        try:
            handle = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LabError(f"host {self.name} is not there: {error.strerror}") from error
        try:
            if ctypes.CDLL(None, use_errno=True).setns(handle, _NETWORK):
                raise LabError(f"cannot enter host {self.name}: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(handle)
        os.environ.update(self.environment())

    def environment(self) -> dict[str, str]:
        """The variables that a process inside needs."""
        return {"GLOO_SOCKET_IFNAME": self.interface, "THINWIRE_HOST": self.name}


def unavailable() -> str | None:
    """Why this machine cannot do it, or None if it can."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"network namespaces need the `{command}` command (iproute2)"
    probe = f"{_own_prefix()}probe"
    try:
        ip("netns", "add", probe)
    except LabError as error:
        return f"this kernel or container does not allow network namespaces: {error}"
    try:
        ip("-n", probe, "link", "add", "eth0", "type", "veth", "peer", "name", "port0")
        ip("-n", probe, "link", "add", "hub", "type", "bridge")
    except LabError as error:
        return f"this kernel or container lacks veth or bridge devices: {error}"
    finally:
        ip("netns", "del", probe)
    return None


@contextmanager
def network(
    hosts: int, *, rate: str | None = None, links: str | Links | None = None
) -> Generator[list[Host], None, None]:
    """`hosts` hosts, each with one interface to a common bridge; gone with everything in them at the end.

    Args:
        hosts: how many, up to 250.
        rate: what an interface may send and receive ("100mbit"); None: no limit.
        links: in place of a rate, the links of all hosts, in the words of `thinwire.net.link`.
    """
    prefix = _own_prefix()
    members: list[Host] = []
    try:
        members = build(prefix, hosts, links or rate or "none")
        yield members
    finally:
        for host in members:
            for process in host.processes:
                if process.poll() is None:
                    process.kill()
                process.communicate()
        remove(*(name for name in namespaces() if name.startswith(prefix)))


def build(prefix: str, hosts: int, links: str | Links) -> list[Host]:
    """Namespaces whose names begin with `prefix`; if one cannot be made, none is left."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise ConfigError(f"from 1 to {MOST_HOSTS} hosts, not {hosts}")
    asked = parse(links)
    each = asked.of(hosts)
    if any(link.jitter or link.latency not in (0.0, Link().latency) for link in each):
        raise ConfigError(f"link {asked.text!r}: the lab limits rates only: leave out latency and jitter")
    reason = unavailable()
    if reason:
        raise ConfigError(f"the lab cannot be built: {reason}")
    members = [Host(f"{prefix}h{number}", address_of(number)) for number in range(hosts)]
    hub = f"{prefix}hub"
    made: list[str] = []
    try:
        for name in (hub, *(host.name for host in members)):
            # Before the command: it may have done its work when a signal interrupts it.
            made.append(name)
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "hub", "type", "bridge")
        ip("-n", hub, "link", "set", "hub", "up")
        for number, (host, link) in enumerate(zip(members, each, strict=True)):
            _join(host, hub, f"port{number}", link)
    except BaseException:
        remove(*made)
        raise
    return members


def remove(*names: str) -> None:
    """Delete these namespaces, as far as they exist."""
    existing = set(namespaces())
    for name in names:
        if name in existing:
            ip("netns", "del", name)


def namespaces() -> list[str]:
    """The names of all namespaces of this machine, thinwire's or not."""
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def address_of(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _own_prefix() -> str:
    return f"{PREFIX}p{os.getpid()}.{start_of(os.getpid())}-{next(_numbers)}-"


def start_of(process: int) -> str | None:
    """When a process started, in the kernel's ticks; None if there is none. Numbers are used again."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]


def _join(host: Host, hub: str, port: str, link: Link) -> None:
    inside = ("-n", host.name)
    ip(*inside, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", hub)
    ip(*inside, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    ip(*inside, "link", "set", INTERFACE, "up")
    ip("-n", hub, "link", "set", port, "master", "hub", "up")
    # What leaves the host's interface is sent, what leaves the bridge's port is received.
    for name, device, bandwidth in (
        (host.name, INTERFACE, link.up_bandwidth),
        (hub, port, link.down_bandwidth),
    ):
        if not math.isinf(bandwidth):
            # A deep bucket would let the first bytes of every operation through at once.
            burst = max(SMALLEST_BURST, round(BURST_SECONDS * bandwidth))
            limit = ("rate", f"{round(8 * bandwidth)}bit", "burst", f"{burst}b", "latency", "400ms")
            run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limit)


def ip(*arguments: str) -> str:
    return run("ip", *arguments)


def run(*command: str) -> str:
    """Run a command and return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
