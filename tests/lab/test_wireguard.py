"""docs/security.md: two hosts train through a WireGuard tunnel, and send nothing beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.tools.lab import namespaces
from thinwire.tools.lab.namespaces import Host, LabError, ip, run

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import thinwire

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(256, 256))
session = thinwire.attach(model, "fp16")
for _ in range(3):
    model(torch.randn(4, 256)).square().mean().backward()
print("sent", session.meter.sent_bytes)
session.detach()
dist.destroy_process_group()
"""

# Counts the packets on an interface by IP protocol until it is told to stop.
WATCH = """
import collections, signal, socket, sys

seen = collections.Counter()
line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
line.bind((sys.argv[1], 0))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print(seen["tcp"], seen["udp"])))
print("ready", flush=True)
while True:
    packet = line.recv(2048)
    if packet[12:14] == bytes([8, 0]):
        seen[{6: "tcp", 17: "udp"}.get(packet[23], "other")] += 1
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    if shutil.which("wg") is None:
        pytest.skip("needs the `wg` command (wireguard-tools)")
    with namespaces.network(2) as made:
        yield made


def tunnel(host: Host, number: int, folder: Path) -> subprocess.Popen[str] | None:
    """A WireGuard interface in the host, by the kernel or by wireguard-go."""
    name = f"twg{number}"  # unique on the machine: wireguard-go has a socket of that name
    key = folder / name
    key.touch(mode=0o600)
    key.write_text(run("wg", "genkey"))
    program = None
    try:
        ip("-n", host.name, "link", "add", name, "type", "wireguard")
    except LabError:
        if shutil.which("wireguard-go") is None or not Path("/dev/net/tun").exists():
            pytest.skip("this kernel has no WireGuard, and there is no wireguard-go with /dev/net/tun")
        program = host.start(["wireguard-go", "--foreground", name])
        deadline = time.monotonic() + 20
        while name not in ip("-n", host.name, "-br", "link"):
            assert time.monotonic() < deadline, "wireguard-go made no interface"
            time.sleep(0.1)
    return program


def connect(hosts: list[Host], folder: Path) -> None:
    """What docs/security.md does with wg-quick."""
    publics = [
        subprocess.run(
            ["wg", "pubkey"],
            input=(folder / f"twg{n}").read_text(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for n in (0, 1)
    ]
    for mine, host in enumerate(hosts):
        name, other = f"twg{mine}", 1 - mine
        peer = ("peer", publics[other], "allowed-ips", f"198.51.100.{other + 1}/32")
        endpoint = ("endpoint", f"{hosts[other].address}:51820")
        own = ("listen-port", "51820", "private-key", str(folder / name))
        run("ip", "netns", "exec", host.name, "wg", "set", name, *own, *peer, *endpoint)
        ip("-n", host.name, "address", "add", f"198.51.100.{mine + 1}/24", "dev", name)
        ip("-n", host.name, "link", "set", name, "mtu", "1420", "up")


def watch(host: Host) -> subprocess.Popen[str]:
    watcher = host.start([sys.executable, "-c", WATCH, host.interface])
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "ready\n"
    return watcher


def test_training_goes_through_the_tunnel_alone(hosts: list[Host], tmp_path: Path) -> None:
    for number, host in enumerate(hosts):
        tunnel(host, number, tmp_path)
    connect(hosts, tmp_path)
    watchers = [watch(host) for host in hosts]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ranks = [
        host.start(
            [sys.executable, str(script)],
            {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "198.51.100.1",
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": f"twg{rank}",
            },
        )
        for rank, host in enumerate(hosts)
    ]
    for process in ranks:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        payload = int(out.split()[-1])
        assert payload > 100_000
    for watcher in watchers:
        watcher.terminate()
        tcp, udp = map(int, watcher.communicate(timeout=30)[0].split())
        assert tcp == 0
        assert udp > 100
