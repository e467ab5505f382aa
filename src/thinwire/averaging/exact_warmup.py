"""Data-parallel steps before the first local ones, and what they tell about the noise of own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from thinwire.averaging.fragments import Block, Piece
from thinwire.averaging.sync_round import mean_in_place
from thinwire.core.channel import Channel, mark_of, together
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo

MEMORY = 0.98
"""What is left of a squared norm after a step: about the last 50 steps count."""
_MARK = mark_of("thinwire gradients of a warm-up step")


class ExactWarmup:
    """Averages gradients in the warm-up of a schedule; afterwards it scales second moments.

    The squared gradient of one rank is larger than that of the mean, by the noise that the mean averages
    away. For every tensor the warm-up measures how many times: r = (1/W) sum_i ||g_i||^2 / ||g||^2, between 1
    and W. In local steps Adam's second moment grows by g_i^2 / r, so that they are as long as those before.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._pieces = [piece for block in blocks for piece in block.pieces]
        self.own = torch.zeros(len(self._pieces), dtype=torch.float64)
        self.common = torch.zeros(len(self._pieces), dtype=torch.float64)
        self.averaged_step = -1
        """The last step whose gradients have been averaged."""

    async def average(
        self, step: int, buffers: Sequence[torch.Tensor], rank_info: RankInfo, link: Link
    ) -> bool:
        """Replace gradients and buffers by their means. False if gradients are not finite, and removed."""
        flats = [torch.cat([_gradient(piece).reshape(-1) for piece in b.pieces]) for b in self._blocks]
        own = self._squared_norms(flats)
        ch = Channel(rank_info, step=0, seed=0, key="", device=flats[0].device)
        copies = [buffer.detach().reshape(-1).clone() for buffer in buffers]
        tasks = [mean_in_place(flat, ch) for flat in (*flats, own, *copies) if flat.numel()]
        await together(tasks, rank_info, step=step, mark=_MARK, link=link)
        common = self._squared_norms(flats)
        finite = bool(common.isfinite().all()) and bool(own.isfinite().all())
        if finite:
            self.own.mul_(MEMORY).add_(own.cpu())
            self.common.mul_(MEMORY).add_(common.cpu())
        for block, flat in zip(self._blocks, flats, strict=True):
            for piece, mean in zip(block.pieces, block.layout.parts(flat), strict=True):
                _set_gradient(piece, mean if finite else None)
        for buffer, mean in zip(buffers, copies, strict=True):
            buffer.copy_(mean.view(buffer.shape))
        self.averaged_step = step
        return finite

    def _squared_norms(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [part for b, flat in zip(self._blocks, flats, strict=True) for part in b.layout.parts(flat)]
        return torch.stack([part.double().square().sum() for part in parts])

    def ratios(self, size: int) -> list[float]:
        """r of every piece; 1 where nothing has been measured."""
        found = (self.own / self.common).nan_to_num(1.0, 1.0, 1.0).clamp(1.0, float(size))
        return cast("list[float]", found.tolist())

    @torch.no_grad()
    def scale_second_moments(self, optimizer: torch.optim.Optimizer, size: int) -> None:
        """After a local step: take back what the squared gradient added beyond g^2 / r."""
        betas = {id(p): group.get("betas") for group in optimizer.param_groups for p in group["params"]}
        state = cast("dict[torch.Tensor, dict[str, Any]]", optimizer.state)
        for piece, ratio in zip(self._pieces, self.ratios(size), strict=True):
            second = state.get(piece.parameter, {}).get("exp_avg_sq")
            gradient, beta = piece.parameter.grad, betas.get(id(piece.parameter))
            if second is None or gradient is None or beta is None or ratio == 1:
                continue
            own = piece.of(gradient).to(second.dtype)
            piece.of(second).addcmul_(own, own, value=-(1 - float(beta[1])) * (1 - 1 / ratio))


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
