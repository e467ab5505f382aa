"""The meter against the kernel: bytes that really leave a network interface."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from thinwire.tools.lab import namespaces

METHODS = ("dense", "topk(ratio=0.01)", "qsgd(bits=4)", "powersgd(rank=8)")
STEPS = 50


def measure(size: int, methods: tuple[str, ...], steps: int) -> list[dict[str, dict[str, int]]]:
    """What every rank reports, each rank in a host of its own."""
    return reports(Path(__file__).with_name("kernel_bytes_worker.py"), size, str(steps), *methods)


def reports(worker: Path, size: int, *arguments: str, per_host: int = 1) -> list[dict[str, dict[str, int]]]:
    """The last line that this script prints on each rank; `per_host` of them share a host."""
    with namespaces.network(size // per_host) as hosts:
        processes = [
            hosts[rank // per_host].start(
                [sys.executable, str(worker), str(rank), str(size), hosts[0].address, *arguments]
            )
            for rank in range(size)
        ]
        results = []
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, f"rank {rank}: {err[-2000:]}"
            results.append(json.loads(out.splitlines()[-1]))
        return results


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_an_interface_sends_what_the_meter_says(size: int) -> None:
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    for rank, by_method in enumerate(measure(size, METHODS, STEPS if size == 2 else 20)):
        for method, counted in by_method.items():
            ratio = counted["kernel"] / counted["metered"]
            assert 1.00 <= ratio <= 1.08, f"{method}, rank {rank} of {size}: {ratio:.4f}, {counted}"


def test_a_host_with_two_ranks_sends_what_the_meter_of_its_leader_says() -> None:
    """What its ranks send to each other does not pass its interface."""
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    method = "hierarchical(outer=topk(ratio=0.05), local=2)"
    worker = Path(__file__).with_name("kernel_bytes_worker.py")
    for rank, by_method in enumerate(reports(worker, 4, "20", method, per_host=2)):
        counted = by_method[method]
        assert counted["inside"] > 10 * counted["metered"]
        if rank % 2:
            assert counted["metered"] == 0
        else:
            ratio = counted["kernel"] / counted["metered"]
            assert 1.00 <= ratio <= 1.08, f"rank {rank}: {ratio:.4f}, {counted}"
