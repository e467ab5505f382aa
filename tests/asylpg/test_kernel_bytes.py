"""The server's meter against the kernel: bytes that really cross its network interface."""

import json
import sys
from pathlib import Path

import pytest

from thinwire.lab import namespaces

VARIANTS = ("full", "paper", "centered", "sparse")


def test_the_servers_interface_carries_what_the_meter_says():
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    worker = str(Path(__file__).with_name("kernel_bytes_worker.py"))
    with namespaces.network(3) as hosts:
        processes = [
            host.start([sys.executable, worker, str(rank), "3", hosts[0].address, *VARIANTS])
            for rank, host in enumerate(hosts)
        ]
        results = []
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, f"rank {rank}: {err[-2000:]}"
            results.append(json.loads(out.splitlines()[-1]))
    for rank, by_variant in enumerate(results):
        for variant, counted in by_variant.items():
            for way in ("sent", "received"):
                ratio = counted[f"kernel {way}"] / counted[f"metered {way}"]
                assert 1.00 <= ratio <= 1.08, f"{variant}, rank {rank}, {way}: {ratio:.4f}, {counted}"
