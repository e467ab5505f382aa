"""Periodic averaging: replicas train by themselves, with a sync round every few steps. No DDP, few bytes.

torchrun --standalone --nproc-per-node 4 examples/periodic.py
torchrun --standalone --nproc-per-node 4 examples/periodic.py --method "localsgd(every=16)"
"""

import argparse

import torch
import torch.distributed as dist
from ddp_before import data
from torch import nn
from torch.nn.functional import cross_entropy

import thinwire


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--method", default="pqasgd(every=8, bits=8)")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # A bare model: all ranks get rank 0's parameters here. Sync rounds run inside optimizer.step().
    session = thinwire.attach(model, arguments.method, optimizer=optimizer)

    points, labels = data()
    rng = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(arguments.steps):
        batch = torch.randint(len(points), (32,), generator=rng)
        optimizer.zero_grad()
        cross_entropy(model(points[batch]), labels[batch]).backward()
        optimizer.step()
    session.finish()  # a last sync round: all ranks have the same model now

    if dist.get_rank() == 0:
        accuracy = (model(points).argmax(1) == labels).float().mean()
        print(f"accuracy {accuracy:.3f} after {arguments.steps} steps with {session.method}")
        sent, dense = session.meter.sent_bytes / arguments.steps, session.dense_bytes
        print(f"{sent:,.0f} bytes sent per step; the model has {dense:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
