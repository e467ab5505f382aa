"""Replicas that drift apart, and their reconciliation: the mean of the parameters themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.core.channel import Channel, Program, mark_of, together
from thinwire.core.optimizers import Optimizers
from thinwire.core.shards import local
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo


def bare(model: nn.Module) -> nn.Module:
    """The model without its DistributedDataParallel wrapper, if it has one."""
    return cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model


class Replicas:
    """The parameters of one rank, and the optimizers' state for them."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], optimizers: Optimizers) -> None:
        self._parameters = dict(parameters)
        self._optimizers = optimizers

    def reconcile(self, rank_info: RankInfo, step: int, link: Link) -> Program:
        """Replace all of them with their means, which are equal on all ranks to the last bit."""
        return self._reconcile(rank_info, step, link)

    async def _reconcile(self, rank_info: RankInfo, step: int, link: Link) -> None:
        tensors = self._tensors()
        described = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()]
        mark = mark_of("\n".join(["replicas", *described]))
        # An empty frame: before anything is summed, its mark shows whether all ranks average the same tensors
        # (an optimizer that has not stepped yet on one rank has fewer).
        device = next(iter(tensors.values())).device
        ch = Channel(rank_info, step=step, seed=0, key="", device=device, link=link)
        await together([_compare(ch, device)], rank_info, step=step, mark=mark, link=link)
        tasks = [_average(tensor, ch) for tensor in tensors.values()]
        await together(tasks, rank_info, step=step, mark=mark, link=link)

    def spread(self, rank_info: RankInfo, step: int, link: Link, result: list[float]) -> Program:
        """Appends the largest distance of a rank's parameters from their mean, relative to its norm."""
        flat = torch.cat([local(tensor).detach().reshape(-1).float() for tensor in self._parameters.values()])
        ch = Channel(rank_info, step=step, seed=0, key="", device=flat.device, link=link)
        return together([_spread(flat, ch, result)], rank_info, step=step, mark=mark_of("spread"), link=link)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """By name, in an order that is equal on all ranks."""
        found = {name: local(parameter) for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            kept = self._optimizers.remembered(parameter)
            found |= {f"{name}\n{field}": value for field, value in kept.items()}
        return found


async def _compare(ch: Channel, device: torch.device) -> None:
    await ch.gather([torch.empty(0, dtype=torch.uint8, device=device)])


async def _average(tensor: torch.Tensor, ch: Channel) -> None:
    mean = await ch.mean(tensor.detach().contiguous().view(-1))
    tensor.detach().copy_(mean.view(tensor.shape))


async def _spread(flat: torch.Tensor, ch: Channel, result: list[float]) -> None:
    mean = await ch.mean(flat)
    distance = (flat - mean).double().square().sum().sqrt().reshape(1)
    farthest = max(float(theirs[0]) for (theirs,) in await ch.gather([distance]))
    norm = float(mean.double().square().sum().sqrt())
    result.append(farthest / norm if norm else farthest)
