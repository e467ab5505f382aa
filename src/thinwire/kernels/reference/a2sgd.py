"""A2SGD's two means in plain torch."""

import torch
from torch import Tensor


def two_means(x: Tensor) -> Tensor:
    positive = x >= 0
    return torch.stack([_mean(x, positive), _mean(x, ~positive)]).float()


def a2sgd_apply(x: Tensor, shifts: Tensor, out: Tensor) -> None:
    out.copy_(x.float() + torch.where(x >= 0, shifts[0], shifts[1]))


def _mean(x: Tensor, part: Tensor) -> Tensor:
    """Of the entries in this part, in double precision; 0 if there are none."""
    return torch.where(part, x, 0.0).double().sum() / part.sum().clamp(min=1)
