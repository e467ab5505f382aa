"""Finiteness in plain torch."""

import torch
from torch import Tensor


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())
