"""Chunk-wise arg-max in plain torch."""

import torch
from torch import Tensor

from thinwire.kernels.reference.selection import magnitudes, summed


def chunk_argmax(x: Tensor, grad: Tensor | None, chunk: int) -> Tensor:
    n = x.numel()
    count = -(-n // chunk)
    # -1 never wins against a magnitude, so the padding of the last chunk is never chosen.
    padded = torch.full((count * chunk,), -1, dtype=torch.int32, device=x.device)
    padded[:n] = magnitudes(summed(x, grad))
    rows = padded.view(count, chunk)
    if count == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    top = rows.amax(dim=1, keepdim=True)
    first = (rows == top).to(torch.uint8).argmax(dim=1)
    return (first + torch.arange(count, device=x.device) * chunk).to(torch.int32)
