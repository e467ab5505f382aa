"""Count sketch in Triton: all rows of the table in one pass over the tensor.

The top-k of the estimates reads the table alone: estimates above a threshold from a sample are candidates,
and only where those do not suffice are all estimates stored.
"""

from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.reference.sketch import BLOCK
from thinwire.kernels.triton import _candidates, _launch
from thinwire.kernels.triton._candidates import Buffer, Source
from thinwire.kernels.triton._launch import Argument, launch, signed32
from thinwire.kernels.triton.programs import sketch as programs
from thinwire.kernels.triton.selection import keep_largest, topk

SAMPLE_BLOCKS = 1024


def sketch_insert(x: Tensor, seed: int, table: Tensor) -> None:
    rows, cols = table.shape
    _launch_blocks(programs.insert, x.numel(), rows, x, x.numel(), *_halves(seed), cols, table)


def sketch_query(table: Tensor, numel: int, seed: int, out: Tensor) -> None:
    if out.dtype == torch.float32:
        _query(table, numel, seed, 1, None, out)
        return
    wide = torch.empty(numel, dtype=torch.float32, device=out.device)
    _query(table, numel, seed, 1, None, wide)
    out.copy_(wide)


def sketch_query_topk(table: Tensor, numel: int, seed: int, k: int) -> Tensor:
    estimates = torch.empty(numel, dtype=torch.float32, device=table.device)
    sampled = SAMPLE_BLOCKS * BLOCK
    if k == 0 or k > numel // 4 or numel < 4 * sampled:
        sketch_query(table, numel, seed, estimates)
        return topk(estimates, None, k)[0]
    rows, cols = table.shape
    rank = _candidates.sample_rank(k, numel, sampled)
    sample = torch.empty(sampled, dtype=torch.float32, device=table.device)
    _query(table, sampled, seed, numel // BLOCK // SAMPLE_BLOCKS, None, sample)
    above = _candidates.sampled_threshold(sample, rank)
    buffer = Buffer.empty(table, numel, _candidates.room(rank, sampled, numel))
    _launch_blocks(
        programs.query_collecting, numel, rows, table, numel, *_halves(seed), cols,
        above, buffer.capacity, buffer.total, *buffer.parts,
    )  # fmt: skip
    short = ((buffer.total < k) | (buffer.total > buffer.capacity)).to(torch.int32)
    _query(table, numel, seed, 1, short, estimates)
    return keep_largest(Source(estimates), buffer, k, _candidates.empty_selection(table, k))[0]


def _query(table: Tensor, n: int, seed: int, stride: int, active: Tensor | None, out: Tensor) -> None:
    rows, cols = table.shape
    _launch_blocks(programs.query, n, rows, table, n, *_halves(seed), cols, stride, active, out)


def _launch_blocks(program: Any, n: int, rows: int, *arguments: Argument) -> None:
    blocks = _launch.TILE // BLOCK
    launch(program, _launch.over(n), *arguments, ROWS=rows, BLOCKS=blocks)


def _halves(seed: int) -> tuple[int, int]:
    return signed32(seed & 0xFFFFFFFF), signed32((seed >> 32) & 0xFFFFFFFF)
