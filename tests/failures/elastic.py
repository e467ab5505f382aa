"""A worker of an elastic run: torchrun starts it again, with another number of ranks, when nodes come or go.

    torchrun --nnodes 2:4 ... -m tests.failures.elastic FOLDER

It keeps account of all gradients. With plain SGD and error feedback the parameters have moved by the sum of
the mean gradients, except for what is still in the residuals. It trains until FOLDER/end exists, and then
writes FOLDER/result.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

RATE = 0.05
EVERY = 5


class Account:
    """Where the training began, the sum of all mean gradients since, and the mean residual; on all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.start = flat(model.parameters()).double()
        self.gradients = torch.zeros_like(self.start)
        self.residual = torch.zeros_like(self.start)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"start": self.start, "gradients": self.gradients, "residual": self.residual}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.start, self.gradients, self.residual = (state[name] for name in self.state_dict())


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def mean(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def residual(session: thinwire.Session, model: nn.Module) -> torch.Tensor:
    kept = session.residuals()
    return mean(flat(kept.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()))


def everywhere(value: int) -> list[int]:
    said: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    session = thinwire.attach(wrapped, "topk(ratio=0.01)", optimizer=optimizer, dense_below=0)
    account = Account(model)
    checkpointer = thinwire.Checkpointer(
        folder / "checkpoints", session, model, optimizer, every=EVERY, also={"account": account}
    )
    begin = checkpointer.load_latest()
    carried = residual(session, model)
    torch.testing.assert_close(carried, account.residual, rtol=1e-4, atol=1e-7)
    assert everywhere(begin) == [begin] * size
    assert everywhere(session.step) == [begin] * size
    attempt = {"begin": begin, "ranks": size, "residual": float(carried.norm()), "pid": os.getpid()}
    if rank == 0:
        with (folder / "attempts").open("a") as stream:
            stream.write(json.dumps(attempt) + "\n")

    while True:
        rng = torch.Generator().manual_seed(1000 * rank + checkpointer.steps)
        inputs = torch.randn(8, 40, generator=rng)
        own = torch.autograd.grad((model(inputs) - inputs.roll(1, 1)).square().mean(), model.parameters())
        account.gradients += mean(flat(own))
        optimizer.zero_grad()
        (wrapped(inputs) - inputs.roll(1, 1)).square().mean().backward()
        optimizer.step()
        account.residual = residual(session, model)
        checkpointer.step()
        end = torch.tensor([int((folder / "end").exists())])
        dist.broadcast(end, 0)
        if rank == 0:
            (folder / "reached").write_text(str(checkpointer.steps))
        if end:
            break
        time.sleep(0.02)

    checkpointer.save()
    checkpointer.wait()
    steps = everywhere(checkpointer.steps)
    reference = flat(model.parameters())
    dist.broadcast(reference, 0)
    alike = everywhere(int(torch.equal(reference, flat(model.parameters()))))
    if rank == 0:
        moved = reference.double() - account.start
        owed = -RATE * (account.gradients - account.residual)
        result = {
            "steps": steps,
            "alike": alike,
            "lost": float((moved - owed).norm() / moved.norm()),
            "residual": float(account.residual.norm() * RATE / moved.norm()),
        }
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
