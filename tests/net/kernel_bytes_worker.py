"""One rank of test_kernel_bytes.py, in a namespace. Arguments: rank, size, address, steps, methods."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

WARM_UP = 3


def transmitted() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1024, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def measure(rank: int, method: str, steps: int) -> dict[str, int]:
    """Bytes by the kernel's counter and by the meter, over the steps after the warm-up."""
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    session = thinwire.attach(wrapped, method, optimizer=optimizer)
    data = torch.randn(4, 1024, generator=torch.Generator().manual_seed(rank))
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            dist.barrier()
            kernel, sent, received = transmitted(), session.meter.sent_bytes, session.meter.received_bytes
        wrapped.zero_grad()
        wrapped(data).square().mean().backward()
        optimizer.step()
    # The last acknowledgements of the peers' data are on their way; so is nothing else.
    dist.barrier()
    result = {
        "kernel": transmitted() - kernel,
        "metered": session.meter.sent_bytes - sent,
        "received": session.meter.received_bytes - received,
        "rounds": session.meter.rounds,
        "inside": session.meter.inside.sent_bytes,
    }
    session.detach()
    return result


def main() -> None:
    rank, size, address, steps, *methods = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:29500",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    print(json.dumps({method: measure(int(rank), method, int(steps)) for method in methods}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
