"""What thinwire costs, beside the loss in TensorBoard: pip install tensorboard; tensorboard --logdir out/runs

torchrun --standalone --nproc-per-node 4 examples/with_tensorboard.py
"""

import argparse

import torch
import torch.distributed as dist
from ddp_before import data
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--folder", default="out/runs")
arguments = parser.parse_args()

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
session = thinwire.attach(model, "topk(ratio=0.01)", optimizer=optimizer)
writer = SummaryWriter(arguments.folder) if dist.get_rank() == 0 else None
points, labels = data()
rng = torch.Generator().manual_seed(1 + dist.get_rank())
for step in range(arguments.steps):
    batch = torch.randint(len(points), (32,), generator=rng)
    optimizer.zero_grad()
    loss = cross_entropy(model(points[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    if writer is not None and (step + 1) % 10 == 0:
        writer.add_scalar("loss", loss.item(), step + 1)
        for name, value in session.metrics().items():
            writer.add_scalar(f"thinwire/{name}", value, step + 1)
dist.destroy_process_group()
