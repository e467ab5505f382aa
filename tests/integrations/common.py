"""A model, batches by step and rank, and the environment that the frameworks look at, for workers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from thinwire.hosts.auto import AutoSession
from thinwire.net.launch import Worker
from thinwire.sessions.base import BaseSession

# With SGD: a method with residuals, one that lets replicas drift, and a schedule between two sync rounds.
# With a fused AdamW, which is the Trainer's default: `adam`, whose second moment is frozen when it is saved.
ADAM = "adam(exchange=efsign(bucket=4096), warmup=3)"
SEVERAL = ("topk(ratio=0.1)", "a2sgd", "pqasgd(every=4, bits=8)")
"""With several optimizers."""
METHODS = (*SEVERAL, ADAM)
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


def optimizer_for(method: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if method == ADAM:
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)
    return torch.optim.SGD(parameters, lr=0.1)


def exact_steps(optimizer: torch.optim.Optimizer) -> set[float]:
    """How often a fused AdamW has taken torch's own step; nothing for another optimizer."""
    if not optimizer.param_groups[0].get("fused"):
        return set()
    return {float(state["step"]) for state in optimizer.state.values()}


def seen_by_auto(session: BaseSession) -> list[torch.optim.Optimizer]:
    """The optimizers that an automatic session chooses by."""
    assert isinstance(session, AutoSession)
    return list(session._options.optimizers)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


def same_ends(first: Any, second: Any) -> None:
    """On both ranks a resumed run has the parameters and the counters of one without a stop."""
    for method in METHODS:
        for found in (first[method], second[method]):
            (straight, counted), (resumed, counted_on) = found["straight"], found["resumed"]
            assert found["exact"] == ({3.0} if method == ADAM else set()), method
            assert torch.equal(straight, resumed), method
            for name in ("steps", "bytes_sent", "rounds", "residual_norm"):
                assert counted[name] == counted_on[name], f"{method}: {name}"
            assert counted["steps"] == STEPS
            assert torch.equal(straight, first[method]["straight"][0]), (
                f"{method}: replicas differ at the end"
            )
