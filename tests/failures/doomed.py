"""A worker for torchrun: after some steps the last rank kills itself.

    torchrun --nproc-per-node 3 -m tests.failures.doomed FOLDER

The first rank goes on and waits for the dead one; the second one computes, and does not come to a collective.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.hosts.common import mlp, square_loss


def main() -> None:
    folder = Path(sys.argv[1])
    logging.basicConfig(format="%(created)f %(message)s")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = DistributedDataParallel(mlp())
    thinwire.attach(model, "topk(ratio=0.1)")
    for step in range(4):
        square_loss(model, rank, step).backward()
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        (folder / "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            torch.ones(100, 100).sum()
    square_loss(model, rank, 4).backward()


if __name__ == "__main__":
    main()
