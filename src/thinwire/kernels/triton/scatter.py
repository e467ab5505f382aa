"""Sparse mean in Triton: only the entries that somebody sent are read and divided; the others are cleared.

Workers are added one after the other, so sums have the order of the reference. A 16-bit output gets its
float32 sums in scratch memory, of which only those entries are touched.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.triton._launch import int32_full, launch_tiles
from thinwire.kernels.triton.programs import feedback
from thinwire.kernels.triton.programs import scatter as programs


def ascending_in_range(indices: Tensor, numel: int) -> bool:
    found = int32_full(indices, 0)
    launch_tiles(programs.violations, indices.numel(), indices, indices.numel(), numel, found)
    return not bool(found)


def scatter_mean(indices: Sequence[Tensor], values: Sequence[Tensor], out: Tensor) -> None:
    out.zero_()
    everywhere = torch.cat(list(indices))
    k = everywhere.numel()
    total = out
    if out.dtype != torch.float32:
        total = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        launch_tiles(feedback.zero_at, k, total, everywhere, k)
    for where, what in zip(indices, values, strict=True):
        launch_tiles(programs.add_at, where.numel(), total, where, what, where.numel())
    means = torch.empty(k, dtype=torch.float32, device=out.device)
    launch_tiles(programs.divided_at, k, total, everywhere, k, len(indices), means)
    launch_tiles(programs.store_at, k, out, everywhere, means.to(out.dtype), k)
