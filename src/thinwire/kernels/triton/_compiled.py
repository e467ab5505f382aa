"""`torch.compile` for the families whose entries stand for themselves, with the bits of the reference.

The steps hold no number that the host has to know: what the reference reads stays a tensor, and `fullgraph`
makes every read by the host an error. Floating-point fusion, flushing to zero and approximate division are
off. Division by a constant would become a product with its inverse on a GPU, in `torch.compile` as in plain
torch, so divisors come as tensors.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from thinwire.kernels.generator import keys

P = ParamSpec("P")
R = TypeVar("R")

SETTINGS: dict[str, Any] = {
    "options": {
        "emulate_precision_casts": True,
        "eager_numerics.division_rounding": True,
        "eager_numerics.disable_ftz": True,
    }
}
_RECOMPILES = 32


def compiled(steps: Callable[P, R]) -> Callable[P, R]:
    """Compile on the first call, and again for the second size: then for all sizes."""

    @cache
    def build() -> Callable[P, R]:
        made = cast(Any, torch.compile)(
            steps, fullgraph=True, recompile_limit=_RECOMPILES, isolate_recompiles=True, **SETTINGS
        )
        return cast("Callable[P, R]", made)

    @wraps(steps)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return build()(*args, **kwargs)

    return call


def number(like: Tensor, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A number on the device: filled there, where a copy from the host would make the host wait."""
    return torch.full((), value, dtype=dtype, device=like.device)


def keys_of(seed: int, like: Tensor) -> Tensor:
    """The generator's keys as data."""
    key_a, key_b = keys(seed)
    made = torch.full((2,), key_a, dtype=torch.int64, device=like.device)
    made[1:].fill_(key_b)
    return made


def mean_of(parts: list[Tensor], workers: Tensor) -> Tensor:
    """The reference's mean, summed in order; one worker's part keeps its bits."""
    if len(parts) == 1:
        return parts[0]
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total / workers
