"""PyTorch's own `powerSGD_hook` deadlocks or crashes with several buckets on gloo; `powersgd` trains."""

import pytest
import torch

import thinwire
from tests.hosts.common import buckets_of, flat, mlp, square_loss, wrap
from thinwire.net.launch import Worker, run_local


def train_with_powersgd(worker: Worker) -> tuple[torch.Tensor, int, float, float]:
    model = wrap(mlp(width=256, depth=6), bucket_cap_mb=0.2)
    session = thinwire.attach(model, "powersgd(rank=2)")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    losses = []
    for step in range(12):
        optimizer.zero_grad()
        loss = square_loss(model, worker.rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    session.detach()
    return flat(model), buckets_of(model), losses[0], losses[-1]


def prove(size: int, runs: int) -> None:
    for run in range(runs):
        results = run_local(train_with_powersgd, size, timeout=400, group_timeout=30)
        parameters, buckets, first, last = results[0]
        assert buckets >= 6, f"run {run}: only {buckets} buckets"
        assert last < 0.8 * first, f"run {run}: the loss went from {first} to {last}"
        for rank, (others, *_) in enumerate(results):
            assert torch.equal(parameters, others), f"run {run}: rank {rank} differs"


@pytest.mark.parametrize("size", [2, 4])
def test_powersgd_trains_over_several_buckets(size: int) -> None:
    prove(size, runs=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 4])
def test_powersgd_trains_in_twenty_of_twenty_runs(size: int) -> None:
    prove(size, runs=20)
