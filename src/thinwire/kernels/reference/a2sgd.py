"""A2SGD's two means in plain torch."""

import torch
from torch import Tensor


def two_means(x: Tensor) -> tuple[float, float]:
    positive = x >= 0
    return _mean(x[positive]), _mean(x[~positive])


def a2sgd_apply(x: Tensor, shift_plus: float, shift_minus: float, out: Tensor) -> None:
    shifts = torch.tensor([shift_minus, shift_plus], dtype=torch.float32, device=x.device)
    out.copy_(x.float() + shifts[(x >= 0).long()])


def _mean(part: Tensor) -> float:
    return float(part.double().sum()) / part.numel() if part.numel() else 0.0
