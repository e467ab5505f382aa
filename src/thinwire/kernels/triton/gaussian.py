"""Gaussian-k in Triton: moments in one pass, then compaction passes that double as counts.

The search is decided on the device: passes that are no longer needed read nothing. The host waits once, for
the number of selected entries.
"""

import torch
from torch import Tensor

from thinwire.kernels.reference.gaussian import COUNTS, LARGEST, quantile
from thinwire.kernels.triton import _candidates
from thinwire.kernels.triton._candidates import Buffer, Limit, Source
from thinwire.kernels.triton._launch import int32_full, launch, launch_tiles, on_host, over
from thinwire.kernels.triton.programs import gaussian as programs
from thinwire.kernels.triton.programs import moments
from thinwire.kernels.triton.selection import collect_above, collected, keep_largest, topk


def gaussiank(x: Tensor, grad: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    n = x.numel()
    if k in (0, n):
        return topk(x, grad, k)
    sums = torch.empty(over(n), 3, dtype=torch.float64, device=x.device)
    launch_tiles(moments.moments, n, x, grad, n, sums)
    return select_by_moments(Source(x, grad), k, sums.sum(0))


def select_by_moments(
    source: Source, k: int, sums: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`sums`: of the finite entries (how many, their sum, the sum of squares). Takes out of `residual`."""
    control, buffer = _search(source, k, first_threshold(sums, k, source.n))
    seen = on_host(control)
    if not seen[3]:
        return keep_largest(
            source, collected(source, k), k, _candidates.empty_selection(source.x, k), residual
        )
    everything = Limit(int32_full(source.x, -1), None, int32_full(source.x, 0))
    counts = torch.stack((buffer.counts, torch.zeros_like(buffer.counts)))
    out = _candidates.empty_selection(source.x, seen[0])
    return _candidates.write_kept(source, buffer, 1, everything, counts, out, residual)


def first_threshold(sums: Tensor, k: int, numel: int) -> Tensor:
    """That of the reference, from the sums."""
    count, total, squares = sums.unbind()
    mean = total / count.clamp(min=1)
    variance = (squares - total * mean).clamp(min=0.0) / (count - 1).clamp(min=1)
    return (mean.abs() + variance.sqrt() * quantile(k, numel)).clamp(max=LARGEST).float()


def _search(source: Source, k: int, first: Tensor) -> tuple[Tensor, Buffer]:
    control = torch.ones(4, dtype=torch.int32, device=source.x.device)
    control[0] = 0
    control[1:2] = first.view(1).view(torch.int32)
    state = torch.full((5,), torch.nan, dtype=torch.float64, device=source.x.device)
    state[:1] = first
    state[3] = 0.5
    state[4] = 1.5
    buffer = Buffer.empty(source.x, source.n, 4 * k // 3 + 1, control[:1])
    for _ in range(COUNTS):
        collect_above(source, control[1:2], control[2:3], buffer)
        launch(programs.advance, 1, control, state, k)
    return control, buffer
