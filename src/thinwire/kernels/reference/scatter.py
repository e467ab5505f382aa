"""Sparse mean in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def ascending_in_range(indices: Tensor, numel: int) -> bool:
    if indices.numel() == 0:
        return True
    ascending = bool((indices[1:] > indices[:-1]).all())
    return ascending and int(indices[0]) >= 0 and int(indices[-1]) < numel


def ascending_flag(indices: Tensor, numel: int) -> Tensor:
    """The same as a tensor on the device of the indices."""
    ends = torch.cat([indices.new_full((1,), -1), indices, indices.new_full((1,), numel)])
    return (ends[1:] > ends[:-1]).all()


def scatter_mean(indices: Sequence[Tensor], values: Sequence[Tensor], out: Tensor) -> None:
    total = torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    for where, what in zip(indices, values, strict=True):
        total.index_add_(0, where, what.float())
    out.copy_(total / len(indices))
