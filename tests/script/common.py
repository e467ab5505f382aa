"""Small training scripts, written to a folder and run there as a user would."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.script.forked import use_forked_workers
from thinwire.tools.cli import app

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
RUN = ("-m", "thinwire", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thinwire", "run")


def write(folder: Path, source: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(source))
    return path


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}  # nothing is folded


def command(folder: Path, *words: str, launcher: tuple[str, ...] = RUN, process: bool = False) -> Any:
    """`python LAUNCHER WORDS` in the folder.

    thinwire itself is called right here, with forked workers, unless a process is asked for, whose start
    takes seconds.
    """
    if launcher[:2] == RUN[:2] and not process:
        return here(folder, [*launcher[2:], *words])
    return subprocess.run(
        [sys.executable, *launcher, *words],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def here(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """`thinwire WORDS` in this process, with the output of the workers that it starts."""
    code: Any = 0
    with (
        tempfile.TemporaryFile("w+", buffering=1) as out,
        tempfile.TemporaryFile("w+", buffering=1) as err,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(folder)
        use_forked_workers(patch)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        try:
            with written_to(1, out), written_to(2, err):
                app(words)
        except SystemExit as ended:
            code = ended.code or 0
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


@contextlib.contextmanager
def written_to(descriptor: int, file: TextIO) -> Generator[None]:
    """Standard output (1) or errors (2) of this process and its children go to the file."""
    kept = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    redirect = contextlib.redirect_stdout if descriptor == 1 else contextlib.redirect_stderr
    try:
        with redirect(file):
            yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def run(folder: Path, source: str, *options: str, arguments: tuple[str, ...] = (), **more: Any) -> Any:
    write(folder, source)
    return command(folder, *options, "train.py", *arguments, **more)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out/run.json").read_text())
