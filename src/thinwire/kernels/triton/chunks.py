"""Top-k by chunks in Triton: one pass, each chunk added, searched and cleared while it is in registers.

Chunks beyond `LARGEST_CHUNK` entries do not fit into the registers of one program: those take the reference.
"""

from torch import Tensor

from thinwire.kernels.reference import chunks as reference
from thinwire.kernels.triton import _launch
from thinwire.kernels.triton._candidates import empty_selection
from thinwire.kernels.triton.programs import chunks as programs

LARGEST_CHUNK = 16384


def chunk_topk(x: Tensor, grad: Tensor | None, k: int, last: int, chunk: int) -> tuple[Tensor, Tensor]:
    if chunk > LARGEST_CHUNK:
        return reference.chunk_topk(x, grad, k, last, chunk)
    return _take(x, grad, k, last, chunk, None, accumulate=False)


def feedback_chunk_topk(
    residual: Tensor, grad: Tensor, k: int, last: int, chunk: int, undo: Tensor | None
) -> tuple[Tensor, Tensor]:
    if chunk > LARGEST_CHUNK:
        return reference.feedback_chunk_topk(residual, grad, k, last, chunk, undo)
    return _take(residual, grad, k, last, chunk, undo, accumulate=True)


def _take(
    x: Tensor, grad: Tensor | None, k: int, last: int, chunk: int, undo: Tensor | None, accumulate: bool
) -> tuple[Tensor, Tensor]:
    n = x.numel()
    count = -(-n // chunk)
    out = empty_selection(x, (count - 1) * k + last if n else 0)
    size = 1 << (chunk - 1).bit_length()
    rows = max(1, _launch.TILE // size)
    _launch.launch(
        programs.take_chunks, -(-count // rows), x, grad, n, chunk, k, last, undo, *out,
        ACCUMULATE=accumulate, ROWS=rows, SIZE=size, num_warps=min(16, max(4, size // 512)),
    )  # fmt: skip
    return out
