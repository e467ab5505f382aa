"""Accelerate with thinwire: attach after `prepare`; `save_state` and `load_state` include the session.

torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py
"""

import argparse

import torch
from accelerate import Accelerator
from ddp_before import data
from torch import nn
from torch.nn.functional import cross_entropy

from thinwire.integrations.accelerate import attach

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--method", default="adam(warmup=20)")
parser.add_argument("--folder", default="out/accelerate")
arguments = parser.parse_args()

accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
session = attach(accelerator, model, arguments.method, optimizer)

points, labels = data()
rng = torch.Generator().manual_seed(1 + accelerator.process_index)
for _ in range(arguments.steps):
    batch = torch.randint(len(points), (32,), generator=rng)
    optimizer.zero_grad()
    accelerator.backward(cross_entropy(model(points[batch]), labels[batch]))
    optimizer.step()
accelerator.save_state(arguments.folder)
if session.reconcile_every is not None:  # a schedule: a last sync round, and all ranks have the same model
    session.reconcile()
accuracy = (model.module(points).argmax(1) == labels).float().mean()
accelerator.print(f"accuracy {accuracy:.3f} after {arguments.steps} steps")
accelerator.print(f"{session.metrics()['bytes_sent'] / arguments.steps:,.0f} bytes sent per step")
accelerator.end_training()
