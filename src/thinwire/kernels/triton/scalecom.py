"""Chunk-wise arg-max on a GPU."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from thinwire.kernels.reference import scalecom as reference
from thinwire.kernels.reference.selection import magnitudes, summed
from thinwire.kernels.triton._compiled import compiled


def chunk_argmax(x: Tensor, grad: Tensor | None, chunk: int) -> Tensor:
    return _steps(chunk)(x, grad) if x.numel() else reference.chunk_argmax(x, grad, chunk)


@cache
def _steps(chunk: int) -> Callable[[Tensor, Tensor | None], Tensor]:
    @compiled
    def steps(x: Tensor, grad: Tensor | None) -> Tensor:
        count = -(-x.numel() // chunk)
        padded = torch.full((count * chunk,), -1, dtype=torch.int32, device=x.device)
        padded[: x.numel()] = magnitudes(summed(x, grad))
        rows = padded.view(count, chunk)
        places = torch.arange(count * chunk, dtype=torch.int32, device=x.device).view(count, chunk)
        # The first of equals, by its place: which one an arg-max finds differs between devices.
        return torch.where(rows == rows.amax(1, keepdim=True), places, count * chunk).amin(1).int()

    return steps
