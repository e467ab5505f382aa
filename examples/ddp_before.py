"""A plain DistributedDataParallel script, before thinwire.

torchrun --standalone --nproc-per-node 4 examples/ddp_before.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def data(count: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten clusters of points in 64 dimensions, generated here so that nothing needs to be downloaded."""
    rng = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 64, generator=rng)
    labels = torch.randint(10, (count,), generator=rng)
    return centres[labels] + torch.randn(count, 64, generator=rng), labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    points, labels = data()
    rng = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        batch = torch.randint(len(points), (32,), generator=rng)
        optimizer.zero_grad()
        loss = cross_entropy(model(points[batch]), labels[batch])
        loss.backward()
        optimizer.step()

    if dist.get_rank() == 0:
        accuracy = (model.module(points).argmax(1) == labels).float().mean()
        print(f"accuracy {accuracy:.3f} after {steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
