"""TernGrad's codes on a GPU."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from thinwire.kernels.reference import ternary as reference
from thinwire.kernels.reference.quantisation import encode, pack
from thinwire.kernels.triton._compiled import compiled, keys_of, number


def ternary_quantise(x: Tensor, clip_sigma: float | None, seed: int) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return reference.ternary_quantise(x, clip_sigma, seed)
    return _steps(clip_sigma)(x, number(x, x.numel(), torch.float64), keys_of(seed, x))


@cache
def _steps(clip_sigma: float | None) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    @compiled
    def steps(x: Tensor, count: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.float().abs().max()
        if clip_sigma is not None:
            wide = x.double()
            total, squares = wide.sum(), (wide * wide).sum()
            bound = clip_sigma * ((squares - total * (total / count)).clamp(min=0.0) / count).sqrt()
            scale = torch.where((bound == 0.0) | (bound >= scale), scale, bound.float())
        scale = torch.where(x.float().abs().max().isfinite(), scale, torch.nan)
        return pack(encode(x, scale.view(1), 2, x.numel(), keys), 2), scale.view(1)

    return steps
