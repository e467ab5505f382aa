"""A model, batches by step and rank, and the environment that the frameworks look at, for workers."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from thinwire.net.launch import Worker

# A method with residuals, one that lets replicas drift, and a schedule between two sync rounds.
METHODS = ("topk(ratio=0.1)", "a2sgd", "pqasgd(every=4, bits=8)")
STEPS, SAVED = 8, 6


def environment(worker: Worker) -> None:
    """What torchrun sets."""
    here = {"RANK": worker.rank, "LOCAL_RANK": worker.rank, "WORLD_SIZE": worker.size}
    os.environ.update({name: str(value) for name, value in here.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there already


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 64, generator=rng), torch.randint(10, (8,), generator=rng)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def same_ends(first: Any, second: Any) -> None:
    """On both ranks a resumed run has the parameters and the counters of one without a stop."""
    for method in METHODS:
        for found in (first[method], second[method]):
            (straight, counted), (resumed, counted_on) = found["straight"], found["resumed"]
            assert torch.equal(straight, resumed), method
            for name in ("steps", "bytes_sent", "rounds", "residual_norm"):
                assert counted[name] == counted_on[name], f"{method}: {name}"
            assert counted["steps"] == STEPS
            assert torch.equal(straight, first[method]["straight"][0]), (
                f"{method}: replicas differ at the end"
            )
