"""Exact top-k and threshold selection on the CPU.

Top-k below one copy: a threshold slightly under the k-th magnitude, estimated from a sample, lets about 1.2 k
entries through one compaction pass; the exact selection then works on those alone. Where the sample was
misleading, a radix over all entries finds the same result in three passes.
"""

import struct

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import _collect, _pool
from thinwire.kernels.cpu._exact import keep_largest, kth_magnitude, radix_topk
from thinwire.kernels.cpu._jit import F32, I32, kernel
from thinwire.kernels.cpu._memory import scratch_array
from thinwire.kernels.cpu._tensors import Source

# A sample takes runs of one cache line, which costs as much as single entries: one line of 64, at most 4,096.
# More lines would leave fewer survivors, but cost more than those do.
_RUN = 16
_RUNS = 4096
_LINES = 64
# Below this the radix, with its large tables, never pays.
_SMALL = 4 * _RUN * _RUNS


def topk(x: Tensor, grad: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    return topk_of(Source(x, grad), k)


def topk_of(source: Source, k: int) -> tuple[Tensor, Tensor]:
    indices, values = empty_selection(k)
    if k == 0:
        return indices, values
    found = None
    guess = guess_threshold(source, k)
    if guess is not None:
        found = _collect.survivors(source, *guess)
    if found is not None and len(found[0]) >= k:
        keep_largest(*found, k, indices.numpy(), values.numpy(), None)
    else:
        radix_topk(source, k, indices.numpy(), values.numpy())
    return indices, values


def threshold(x: Tensor, grad: Tensor | None, t: float) -> tuple[Tensor, Tensor]:
    source = Source(x, grad)
    above = magnitude_bits(t)
    counts = source.run(lambda a, b, _: _collect.count(a, b, above))
    indices, values = empty_selection(sum(counts))
    collect_counted(source, above, counts, indices.numpy(), values.numpy())
    return indices, values


def collect_counted(source: Source, above: int, counts: list[int], indices: I32, values: F32) -> None:
    """Collect straight into the result, where each range's part has a known place."""
    starts = np.concatenate(([0], np.cumsum(counts)))
    if not source.direct:
        for part, (block, lo) in enumerate(source.widened()):
            _collect.collect_all(block, None, lo, above, indices, values, int(starts[part]))
        return
    ranges = source.cuts()

    def work(part: int) -> None:
        lo, hi = ranges[part]
        _collect.collect_all(*source.views(lo, hi), lo, above, indices, values, int(starts[part]))

    _pool.run(work, len(ranges))


def guess_threshold(source: Source, k: int) -> tuple[int, int] | None:
    """A magnitude that somewhat more than k entries exceed, and how many to make room for.

    None where sampling does not pay: then every entry is a candidate, or the radix decides.
    """
    n = source.numel
    otherwise = (-1, n) if n < _SMALL else None
    if n <= _pool.GRAIN or k > n // 4:
        return otherwise
    sample = _sample(source, min(_RUNS, n // (_LINES * _RUN)))
    return threshold_from(sample, k, n) or otherwise


def threshold_from(sample: F32, k: int, n: int) -> tuple[int, int] | None:
    """`guess_threshold` from a sample of n entries; None if it is too small."""
    expected = k * len(sample) / n
    rank = int(expected + 4.0 * expected**0.5 + 8.0)
    if rank >= len(sample):
        return None
    return kth_magnitude(sample, rank) - 1, int(1.5 * rank / len(sample) * n) + 4096


def _sample(source: Source, runs: int) -> F32:
    stride = source.numel // runs
    out = scratch_array("sample", np.float32, runs * _RUN)
    if source.direct:
        take_runs(*source.views(0, source.numel), stride, out)
        return out
    rows = torch.from_numpy(out).view(runs, _RUN)
    rows.copy_(source.a[: runs * stride].view(runs, stride)[:, :_RUN])
    if source.b is not None:
        rows.add_(source.b[: runs * stride].view(runs, stride)[:, :_RUN])
    return out


@kernel
def take_runs(a: F32, b: F32 | None, stride: int, out: F32) -> None:
    for r in range(len(out) // _RUN):
        to = out[r * _RUN : (r + 1) * _RUN]
        first = a[r * stride : r * stride + _RUN]
        for j in range(len(to)):
            to[j] = first[j]
        if b is not None:
            second = b[r * stride : r * stride + _RUN]
            for j in range(len(to)):
                to[j] += second[j]


def empty_selection(k: int) -> tuple[Tensor, Tensor]:
    return torch.empty(k, dtype=torch.int32), torch.empty(k, dtype=torch.float32)


def magnitude_bits(t: float) -> int:
    """The float32 threshold as the integer that magnitudes compare with; a negative one lets all pass."""
    return max(struct.unpack("i", struct.pack("f", t))[0], -1) if abs(t) <= _LARGEST else _beyond(t)


_LARGEST = 3.4028234663852886e38
_INFINITY_BITS = 0x7F800000


def _beyond(t: float) -> int:
    return _INFINITY_BITS if t > 0 else -1


def warm() -> None:
    x = torch.arange(-100.0, 100.0)
    for grad in (None, x):
        topk(x, grad, 3)
        threshold(x, grad, 1.0)
        source = Source(x, grad)
        take_runs(*source.views(0, 200), 16, np.empty(16, np.float32))
        radix_topk(source, 3, np.empty(3, np.int32), np.empty(3, np.float32))
    topk(x.bfloat16(), None, 3)
