"""A2SGD's two means on a GPU."""

import torch
from torch import Tensor

from thinwire.kernels.reference import a2sgd as reference
from thinwire.kernels.triton._compiled import compiled


def two_means(x: Tensor) -> Tensor:
    return _two_means(x) if x.numel() else reference.two_means(x)


def a2sgd_apply(x: Tensor, shifts: Tensor, out: Tensor) -> None:
    if x.numel():
        _apply(x, shifts, out)


def means_of_signs(x: Tensor) -> Tensor:
    """The means of the entries that are >= 0 and of the others, in double precision; 0 if there are none."""
    positive = x >= 0
    wide = x.double()
    zero = torch.zeros_like(wide)
    plus, minus = torch.where(positive, wide, zero).sum(), torch.where(positive, zero, wide).sum()
    count = positive.double().sum()
    counts = torch.stack((count, torch.ones_like(wide).sum() - count)).clamp(min=1)
    return (torch.stack((plus, minus)) / counts).float()


@compiled
def _two_means(x: Tensor) -> Tensor:
    return means_of_signs(x)


@compiled
def _apply(x: Tensor, shifts: Tensor, out: Tensor) -> None:
    out.copy_(x.float() + torch.where(x >= 0, shifts[0], shifts[1]))
