"""Exact top-k and threshold selection in Triton. Top-k never waits for the device."""

import torch
from torch import Tensor

from thinwire.kernels.triton import _candidates
from thinwire.kernels.triton._candidates import Buffer, Limit, Source
from thinwire.kernels.triton._launch import int32_full, launch_tiles
from thinwire.kernels.triton.programs import candidates as programs


def topk(x: Tensor, grad: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    source = Source(x, grad)
    out = _candidates.empty_selection(x, k)
    if k == 0:
        return out
    return keep_largest(source, collected(source, k), k, out)


def threshold(x: Tensor, grad: Tensor | None, t: float) -> tuple[Tensor, Tensor]:
    source = Source(x, grad)
    limit = fixed_limit(x, t)
    nothing = _candidates.nothing(x)
    return write_counted(source, nothing, limit, _candidates.count_kept(source, nothing, 1, limit))


def collected(source: Source, k: int) -> Buffer:
    """Candidates for the k largest, by a threshold from a sample."""
    guess = _candidates.guessed_capacity(source.n, k)
    if guess is None:
        return _candidates.nothing(source.x)
    rank, capacity = guess
    above = _candidates.sampled_threshold(_candidates.sample_of(source), rank)
    buffer = Buffer.empty(source.x, source.n, capacity)
    collect_above(source, above, int32_full(source.x, 1), buffer)
    return buffer


def collect_above(source: Source, above: Tensor, active: Tensor, buffer: Buffer) -> None:
    launch_tiles(
        programs.collect, source.n, source.x, source.grad, source.n,
        above, active, buffer.capacity, buffer.total, *buffer.parts,
    )  # fmt: skip


def keep_largest(
    source: Source,
    buffer: Buffer,
    k: int,
    out: tuple[Tensor, Tensor],
    residual: Tensor | None = None,
    restore: bool = False,
) -> tuple[Tensor, Tensor]:
    """The k largest candidates; taken out of `residual` as `write_kept` says."""
    limit = _candidates.kth_limit(source, buffer, k)
    number = _candidates.count_kept(source, buffer, k, limit)
    return _candidates.write_kept(source, buffer, k, limit, number, out, residual, restore)


def write_counted(
    source: Source, buffer: Buffer, limit: Limit, number: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All entries above the limit: the host waits for their number, which is the size of the result."""
    out = _candidates.empty_selection(source.x, int(number[0].sum()))
    return _candidates.write_kept(source, buffer, 1, limit, number, out, residual)


def fixed_limit(like: Tensor, t: float) -> Limit:
    """Everything above t, NaN too; a negative t lets all entries pass."""
    bits = int(torch.tensor(t, dtype=torch.float32).view(torch.int32))
    return Limit(int32_full(like, max(bits, -1)), None, int32_full(like, 0))
