"""Data-parallel steps before the first local ones, and what they tell about the noise of own gradients."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, cast

import torch

from thinwire.averaging.fragments import Block, Piece
from thinwire.averaging.sync_round import copy_if_finite, mean_in_place
from thinwire.core.channel import Channel, mark_of, together
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.routing import Router
from thinwire.core.shards import local
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo

MEMORY = 0.98
"""What is left of a squared norm after a step: about the last 50 steps count."""
ENOUGH = 50
"""Steps of a warm-up that tells how noisy gradients are. In the first steps they are nearly alike."""
_MARK = mark_of("thinwire gradients of a warm-up step")


class GradientWarmup:
    """Averages gradients in the warm-up of a schedule; afterwards it scales second moments.

    The squared gradient of one rank is larger than that of the mean, by the noise that the mean averages
    away. For every tensor the warm-up measures how many times: r = (1/W) sum_i ||g_i||^2 / ||g||^2, between 1
    and W. In local steps Adam's second moment grows by g_i^2 / r, so that they are as long as those before.
    A short warm-up, or none, says nothing about it: then r = sqrt(W), in the middle of what it can be.
    """

    def __init__(
        self, blocks: Sequence[Block], exchange: Exchange | None, router: Router, *, steps: int, seed: int
    ) -> None:
        self._blocks = blocks
        self._steps = steps
        self._exchange = exchange
        self._seed = seed
        self._router = router
        self._pieces = [piece for block in blocks for piece in block.pieces]
        self.own = torch.zeros(len(self._pieces), dtype=torch.float64)
        self.common = torch.zeros(len(self._pieces), dtype=torch.float64)
        self.averaged_step = -1
        """The last step whose gradients have been averaged."""
        self._averaged: dict[int, torch.Tensor | None] = {}  # gradients, by parameter

    async def average(
        self, step: int, buffers: Sequence[torch.Tensor], rank_info: RankInfo, link: Link
    ) -> bool:
        """Replace gradients and buffers by their means. False if gradients are not finite, and removed."""
        flats = [torch.cat([_gradient(piece).reshape(-1) for piece in b.pieces]) for b in self._blocks]
        own = self._squared_norms(flats)
        ch = Channel(rank_info, step=step, seed=self._seed, key="", device=flats[0].device, link=link)
        copies = [buffer.detach().reshape(-1).clone() for buffer in buffers]
        tasks = [mean_in_place(flat, ch) for flat in (own, *copies) if flat.numel()]
        exchanged = list[Channel]()
        for block, flat in zip(self._blocks, flats, strict=True):
            tasks += self._means(block.layout, flat, ch, rank_info, exchanged)
        await together(tasks, rank_info, step=step, mark=_MARK, link=link)
        common = self._squared_norms(flats)
        finite = bool(common.isfinite().all()) and bool(own.isfinite().all())
        finite = finite and all(each.committed is not False for each in exchanged)
        if finite:
            self.own.mul_(MEMORY).add_(own.cpu())
            self.common.mul_(MEMORY).add_(common.cpu())
        for block, flat in zip(self._blocks, flats, strict=True):
            for piece, mean in zip(block.pieces, block.layout.parts(flat), strict=True):
                _set_gradient(piece, mean if finite else None)
        for buffer, mean in zip(buffers, copies, strict=True):
            copy_if_finite(mean, buffer)
        self.averaged_step = step
        self._averaged = {id(piece.parameter): piece.parameter.grad for piece in self._pieces}
        return finite

    def computed_since(self) -> list[str]:
        """The parameters with a gradient that was computed after those of the step were averaged."""
        averaged, self._averaged = self._averaged, {}
        present = [(piece, piece.parameter.grad) for piece in self._pieces]
        return [
            piece.name
            for piece, grad in present
            if grad is not None and grad is not averaged[id(piece.parameter)] and bool(local(grad).any())
        ]

    def _means(
        self, layout: Layout, flat: torch.Tensor, ch: Channel, rank_info: RankInfo, exchanged: list[Channel]
    ) -> list[Coroutine[Any, Any, None]]:
        """Of everything at once, or of each tensor by the exchange, if it is not small, on a channel each."""
        if self._exchange is None:
            return [mean_in_place(flat, ch)]
        found = list[Coroutine[Any, Any, None]]()
        for slot, part in zip(layout.slots, layout.parts(flat), strict=True):
            if not part.numel() or self._router.is_small(slot):
                found.append(mean_in_place(part, ch))
                continue
            alone = layout.pick([slot])
            own = Channel(
                rank_info, step=ch.step, seed=self._seed, key=alone.key, device=flat.device, link=ch.link
            )
            exchanged.append(own)
            found.append(self._exchange.run(part, part, self._exchange.init(alone), own))
        return found

    def _squared_norms(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [part for b, flat in zip(self._blocks, flats, strict=True) for part in b.layout.parts(flat)]
        return torch.stack([part.double().square().sum() for part in parts])

    def go_on(self, before: GradientWarmup) -> None:
        """Take over what another warm-up of the same parameters has measured, perhaps in another order."""
        places = {piece.key: place for place, piece in enumerate(before._pieces)}
        order = [places[piece.key] for piece in self._pieces]
        self.own.copy_(before.own[order])
        self.common.copy_(before.common[order])

    def ratios(self, size: int) -> list[float]:
        """r of every piece; 1 where no gradient was measured."""
        if self._steps < ENOUGH:
            return [math.sqrt(size)] * len(self._pieces)
        found = (self.own / self.common).nan_to_num(1.0, 1.0, 1.0).clamp(1.0, float(size))
        return cast("list[float]", found.tolist())

    @torch.no_grad()
    def scale_second_moments(self, optimizer: torch.optim.Optimizer, size: int) -> None:
        """After a local step of an optimizer: take back what the squared gradient added beyond g^2 / r."""
        betas = {id(p): group.get("betas") for group in optimizer.param_groups for p in group["params"]}
        state = cast("Mapping[torch.Tensor, Mapping[str, Any]]", optimizer.state)
        moments: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        weights: list[float] = []
        for piece, ratio in zip(self._pieces, self.ratios(size), strict=True):
            second = state.get(piece.parameter, {}).get("exp_avg_sq")
            gradient, beta = piece.parameter.grad, betas.get(id(piece.parameter))
            if second is None or gradient is None or beta is None or ratio == 1:
                continue
            moments.append(piece.of(second))
            gradients.append(piece.of(gradient).to(second.dtype))
            weights.append(-(1 - float(beta[1])) * (1 - 1 / ratio))
        if moments:
            cast(Any, torch)._foreach_addcmul_(moments, gradients, gradients, weights)


def _gradient(piece: Piece) -> torch.Tensor:
    gradient = piece.parameter.grad
    return torch.zeros_like(piece.of(piece.parameter)) if gradient is None else piece.of(gradient)


def _set_gradient(piece: Piece, mean: torch.Tensor | None) -> None:
    """Where no rank has a gradient, or it is not finite, the optimizer leaves the parameter alone."""
    if mean is None or not bool(mean.any()):
        piece.parameter.grad = None
        return
    if piece.parameter.grad is None:
        piece.parameter.grad = torch.zeros_like(piece.parameter)
    piece.of(piece.parameter.grad).copy_(mean.view(piece.shape))
