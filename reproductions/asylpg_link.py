"""Throughput on slow links: asynchronous runs against synchronous SVRG, every rank on its own host.

Run as a program this is one rank: rank, size, address of rank 0, updates an epoch, epochs.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

RATE = "100mbit"
BATCH = 32
ROWS = 256
# A network of 784-128-64-10, as in the table of MNIST, on random rows: only its size matters here.
WIDTHS = (784, 128, 64, 10)
ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "asynchronous, full precision": {"bits_up": 32, "bits_down": 32},
    "AsyLPG, centered": {"mode": "centered"},
    "Sparse-AsyLPG, centered": {"mode": "centered", "variant": "sparse"},
}
SYNCHRONOUS = "synchronous all-reduce SVRG"


def measure(workers: int, updates: int, epochs: int) -> dict[str, float]:
    """Gradient differences per second that are applied to the parameters, by algorithm."""
    from thinwire.tools.lab import namespaces

    with namespaces.network(workers + 1, rate=RATE) as hosts:
        command = [sys.executable, "-m", "reproductions.asylpg_link"]
        processes = [
            host.start(
                [*command, str(rank), str(workers + 1), hosts[0].address, str(updates), str(epochs)],
                {"OMP_NUM_THREADS": "1"},
            )
            for rank, host in enumerate(hosts)
        ]
        printed = ""
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=900)
            if process.returncode:
                raise RuntimeError(f"rank {rank} of the throughput run failed: {err[-2000:]}")
            printed = out if rank == 1 else printed
        return json.loads(printed.splitlines()[-1])


def _problem() -> Any:
    from thinwire.server import ModuleProblem

    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, WIDTHS[0], generator=random)
    targets = torch.randint(WIDTHS[-1], (ROWS,), generator=random)
    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise(WIDTHS):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    module = torch.nn.Sequential(*layers[:-1])
    for p in module.parameters():
        p.data.copy_(0.05 * torch.randn(p.shape, generator=random))

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return ModuleProblem(module, loss, (inputs, targets))


def _asynchronous(updates: int, epochs: int, name: str, options: dict[str, Any]) -> float:
    """Updates per second over whole epochs, snapshots and full gradients included; not the first epoch."""
    from thinwire.server import asylpg

    seconds: list[float] = []
    asylpg(
        _problem(),
        name=name,
        epochs=epochs,
        epoch_length=updates,
        batch=BATCH,
        lr=0.01,
        progress=False,
        on_epoch=lambda record: seconds.append(record.seconds),
        **options,
    )
    took = torch.tensor([seconds[-1] - seconds[1] if seconds else 0.0], dtype=torch.float64)
    dist.broadcast(took, 0)
    return updates * (epochs - 1) / float(took)


def _synchronous(group: Any, updates: int, epochs: int) -> float:
    """The same epochs, every step the mean of all workers' differences in float32, by all-reduce."""
    problem = _problem()
    rank, workers = group.rank(), group.size()
    steps = max(1, updates // workers)
    x = problem.start()
    random = np.random.default_rng(rank)
    low, high = ROWS * rank // workers, ROWS * (rank + 1) // workers
    begin = 0.0

    def mean(vector: Any, share: float) -> Any:
        tensor = torch.from_numpy(np.ascontiguousarray(vector, np.float32))
        dist.all_reduce(tensor, group=group)
        return tensor.numpy() * np.float32(share)

    for epoch in range(epochs):
        if epoch == 1:
            begin = time.perf_counter()
        snapshot = x.copy()
        full = mean(problem.total(snapshot, low, high)[1], 1 / ROWS)
        for _ in range(steps):
            difference = problem.difference(x, snapshot, random.integers(0, ROWS, BATCH))
            x = x - np.float32(0.01) * (mean(difference, 1 / workers) + full)
    return steps * workers * (epochs - 1) / (time.perf_counter() - begin)


def main() -> None:
    rank, size, updates, epochs = (int(sys.argv[position]) for position in (1, 2, 4, 5))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{sys.argv[3]}:29500",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    found: dict[str, float] = {}
    for number, (label, options) in enumerate(ASYNCHRONOUS.items()):
        found[label] = _asynchronous(updates, epochs, f"run{number}", options)
    group = dist.new_group(list(range(1, size)))
    if rank:
        found[SYNCHRONOUS] = _synchronous(group, updates, epochs)
    sys.stdout.write(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
