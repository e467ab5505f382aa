"""Selecting coordinates, and adding up what the ranks selected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.errors import PayloadError


def kept(ratio: float, numel: int) -> int:
    """How many of `numel` coordinates a ratio keeps: at least one, if there is one."""
    return min(numel, max(1, int(ratio * numel)))


def largest(u: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices (int32, ascending) and values of the k largest magnitudes; a NaN counts as the largest."""
    wide = u.to(torch.promote_types(u.dtype, torch.float32))
    indices = torch.topk(wide.abs(), k, sorted=False).indices.sort().values
    return indices.to(torch.int32), wide[indices]


def check_indices(indices: torch.Tensor, numel: int, source: int) -> None:
    """Indices come from the wire: none may point outside the tensor."""
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= numel):
        bad = int(indices.min()) if int(indices.min()) < 0 else int(indices.max())
        raise PayloadError(f"payload from rank {source} has the index {bad}, outside a tensor of {numel}")


def scatter_mean(received: Sequence[Sequence[torch.Tensor]], out: torch.Tensor) -> None:
    """out = mean over ranks of their (indices, values), added up in rank order."""
    weight = 1.0 / len(received)
    for rank, (indices, _) in enumerate(received):
        check_indices(indices, out.numel(), rank)
    total = torch.zeros(out.numel(), dtype=received[0][1].dtype, device=out.device)
    for indices, values in received:
        total.index_add_(0, indices, values * weight)
    out.copy_(total)
