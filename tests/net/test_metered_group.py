"""Plain DDP on a metered group: the same gradients as without it, metered bytes, and the time of the link."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import ThinwireError
from thinwire.net import costs
from thinwire.net.launch import Worker, run_local
from thinwire.net.metered_group import MeteredGroup

WIDTH, LAYERS, RANKS = 200, 5, 3
RATE = 2e6  # bytes per second of 16 Mbit/s


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def gradients(worker: Worker, group: MeteredGroup | None, steps: int = 3) -> tuple[float, torch.Tensor]:
    """The shortest step with several buckets, and the last gradients."""
    wrapped = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.2)
    times = []
    for _ in range(steps):
        wrapped.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        wrapped(torch.full((2, WIDTH), 0.1 * worker.rank)).square().mean().backward()
        times.append(time.perf_counter() - begin)
    return min(times), torch.cat([p.grad.flatten() for p in wrapped.parameters() if p.grad is not None])


def everything(worker: Worker) -> dict[str, object]:
    found: dict[str, object] = {"plain": gradients(worker, None)[1]}
    for link in ("none", "16mbit"):
        group = MeteredGroup()
        group.throttle(link)
        found[link] = gradients(worker, group)
        found[f"{link} total"] = group.meter.total
        if link == "none":
            largest = dist.AllreduceOptions()
            largest.reduceOp = dist.ReduceOp.MAX
            with pytest.raises(ThinwireError, match="only sums"):
                group.allreduce([torch.ones(1)], largest)
        else:
            found["waits"] = group.meter.network_seconds
        group.close()
    return found


@pytest.fixture(scope="module")
def measured() -> list[dict]:
    return run_local(everything, RANKS)


def test_gradients_are_those_of_plain_ddp(measured: list[dict]) -> None:
    for found in measured:
        for link in ("none", "16mbit"):
            assert torch.equal(found[link][1], found["plain"])


def test_every_byte_of_the_sums_is_metered(measured: list[dict]) -> None:
    gradient = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    for found in measured:
        for link in ("none", "16mbit"):
            total = found[f"{link} total"]
            assert total.payload_bytes == 3 * gradient
            ring = 3 * costs.all_reduce(RANKS, gradient).sent
            assert ring < total.sent_bytes < 1.02 * ring  # and gloo's control messages
            assert total.operations > 3  # several buckets per step


def test_buckets_share_one_link(measured: list[dict]) -> None:
    for found in measured:
        step = costs.TCP_FRAMING * found["16mbit total"].sent_bytes / 3 / RATE
        assert step <= found["16mbit"][0] < 1.5 * step
        assert found["waits"] >= 3 * step
