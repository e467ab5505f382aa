"""Finiteness on a GPU. The host waits for the answer."""

import torch
from torch import Tensor

from thinwire.kernels.triton._compiled import compiled


def all_finite(x: Tensor) -> bool:
    return bool(_all_finite(x)) if x.numel() else True


@compiled
def _all_finite(x: Tensor) -> Tensor:
    return torch.isfinite(x).all()
