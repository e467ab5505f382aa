"""The meter against the kernel: bytes that really leave a network interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.net.launch import Worker, run_local
from thinwire.tools.lab import inside, namespaces

METHODS = ("dense", "topk(ratio=0.01)", "qsgd(bits=4)", "powersgd(rank=8)")
STEPS = 10
WARM_UP = 3


def in_hosts(function: Callable[..., Any], size: int, *arguments: object, per_host: int = 1) -> list[Any]:
    """What the function returns on each rank; `per_host` of them share a host."""
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    with namespaces.network(size // per_host) as hosts:
        places = [hosts[rank // per_host] for rank in range(size)]
        return run_local(function, size, *arguments, hosts=places, timeout=400)


def transmitted() -> int:
    counters = inside.counters()
    assert counters is not None
    return counters.sent


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1024, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def measured(worker: Worker, methods: tuple[str, ...], steps: int) -> dict[str, dict[str, int]]:
    return {method: counted(worker.rank, method, steps) for method in methods}


def counted(rank: int, method: str, steps: int) -> dict[str, int]:
    """Bytes by the kernel's counter and by the meter, over the steps after the warm-up."""
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    session = thinwire.attach(wrapped, method, optimizer=optimizer)
    data = torch.randn(4, 1024, generator=torch.Generator().manual_seed(rank))
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            dist.barrier()
            kernel, sent = transmitted(), session.meter.sent_bytes
        wrapped.zero_grad()
        wrapped(data).square().mean().backward()
        optimizer.step()
    # The last acknowledgements of the peers' data are on their way; so is nothing else.
    dist.barrier()
    result = {
        "kernel": transmitted() - kernel,
        "metered": session.meter.sent_bytes - sent,
        "inside": session.meter.inside.sent_bytes,
    }
    session.detach()
    return result


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_an_interface_sends_what_the_meter_says(size: int) -> None:
    for rank, by_method in enumerate(in_hosts(measured, size, METHODS, STEPS)):
        for method, found in by_method.items():
            ratio = found["kernel"] / found["metered"]
            assert 1.00 <= ratio <= 1.08, f"{method}, rank {rank} of {size}: {ratio:.4f}, {found}"


def test_a_host_with_two_ranks_sends_what_the_meter_of_its_leader_says() -> None:
    """What its ranks send to each other does not pass its interface."""
    method = "hierarchical(outer=topk(ratio=0.05), local=2)"
    for rank, by_method in enumerate(in_hosts(measured, 4, (method,), STEPS, per_host=2)):
        found = by_method[method]
        assert found["inside"] > 10 * found["metered"]
        if rank % 2:
            assert found["metered"] == 0
        else:
            ratio = found["kernel"] / found["metered"]
            assert 1.00 <= ratio <= 1.08, f"rank {rank}: {ratio:.4f}, {found}"
