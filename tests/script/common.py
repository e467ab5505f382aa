"""Small training scripts, written to a folder and run there as a user would."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

HEAD = """
import argparse, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

def net(width=40):
    return nn.Sequential(nn.Linear(width, 100), nn.Tanh(), nn.Linear(100, width))

def train(model, optimizer, steps=4, width=40):
    for step in range(steps):
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()
"""
PLAIN = """
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
print(f"rank {rank} loss {train(model, optimizer):.4f}")
dist.destroy_process_group()
"""
TOPK = ("--method", "topk(ratio=0.1)")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thinwire", "run")


def write(folder: Path, source: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(source))
    return path


def command(folder: Path, *words: str, launcher: tuple[str, ...] = ("-m", "thinwire", "run")) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}  # nothing is folded
    return subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def run(folder: Path, source: str, *options: str, arguments: tuple[str, ...] = (), **more: Any) -> Any:
    write(folder, source)
    return command(folder, *options, "train.py", *arguments, **more)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out/run.json").read_text())
