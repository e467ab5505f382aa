"""Top-k by chunks in plain torch."""

import torch
from torch import Tensor

from thinwire.kernels.reference.feedback import accumulate
from thinwire.kernels.reference.selection import magnitudes, summed, take


def chunk_topk(x: Tensor, grad: Tensor | None, k: int, last: int, chunk: int) -> tuple[Tensor, Tensor]:
    x = summed(x, grad)
    n = x.numel()
    if n == 0:
        return take(x, torch.empty(0, dtype=torch.int64, device=x.device))
    count = -(-n // chunk)
    # -1 never wins against a magnitude, so the padding of the last chunk is never chosen.
    padded = torch.full((count * chunk,), -1, dtype=torch.int32, device=x.device)
    padded[:n] = magnitudes(x)
    order = torch.sort(padded.view(count, chunk), dim=1, descending=True, stable=True).indices
    begins = torch.arange(0, n, chunk, device=x.device)
    chosen = torch.cat([(order[:-1, :k] + begins[:-1, None]).flatten(), order[-1, :last] + begins[-1]])
    return take(x, torch.sort(chosen).values)


def feedback_chunk_topk(
    residual: Tensor, grad: Tensor, k: int, last: int, chunk: int, undo: Tensor | None
) -> tuple[Tensor, Tensor]:
    accumulate(residual, grad, undo)
    indices, values = chunk_topk(residual, None, k, last, chunk)
    residual[indices.long()] = 0.0
    return indices, values
