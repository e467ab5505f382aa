"""Exact selection on the device, without the host knowing how many candidates there were.

A threshold from a sample lets somewhat more than k entries into a buffer, in one pass over the tensor; two
histograms of the candidates find the k-th magnitude, and a last step writes the selection in order. If the
buffer was too small, or has fewer than k, the same steps read the tensor itself: exact for any distribution,
in four more passes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.triton._launch import int32, int32_full, launch, launch_tiles, over
from thinwire.kernels.triton.programs import candidates as programs

RUN = 16
RUNS = 4096
HIGH_SIZE = 1 << 16
LOW_SIZE = 1 << 15
STEP = 8192
"""The bins of a histogram that are searched at once."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Candidates with their places: those of one tile are neighbours; `total` may exceed the capacity."""

    capacity: int
    total: Tensor
    offsets: Tensor
    counts: Tensor
    indices: Tensor
    values: Tensor

    @staticmethod
    def empty(like: Tensor, n: int, capacity: int, total: Tensor | None = None) -> "Buffer":
        return Buffer(
            capacity,
            int32_full(like, 0) if total is None else total,
            torch.zeros(over(n), dtype=torch.int32, device=like.device),
            torch.zeros(over(n), dtype=torch.int32, device=like.device),
            int32(like, capacity),
            torch.empty(capacity, dtype=torch.float32, device=like.device),
        )

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.offsets, self.counts, self.indices, self.values


@dataclass(frozen=True, slots=True)
class Source:
    """What is selected from: x, or x + grad."""

    x: Tensor
    grad: Tensor | None = None

    @property
    def n(self) -> int:
        return self.x.numel()


@dataclass(frozen=True, slots=True)
class Limit:
    """A magnitude on the device, and how many of its equals are selected.

    Without `low`, `high` is the magnitude; otherwise they are its two digits.
    """

    high: Tensor
    low: Tensor | None
    ties: Tensor


def guessed_capacity(n: int, k: int) -> tuple[int, int] | None:
    """(the rank of the threshold in the sample, room for the candidates); None if sampling does not pay."""
    if n < 4 * RUN * RUNS or k > n // 4:
        return None
    rank = sample_rank(k, n, RUN * RUNS)
    return rank, room(rank, RUN * RUNS, n)


def sample_rank(k: int, n: int, sampled: int) -> int:
    """A rank in the sample that is almost certainly below the k-th of all."""
    expected = k * sampled / n
    return int(expected + 4.0 * expected**0.5 + 8.0)


def room(rank: int, sampled: int, n: int) -> int:
    """For the candidates above a sample's entry of this rank."""
    return int(1.5 * rank / sampled * n) + 4096


def sampled_threshold(sample: Tensor, rank: int) -> Tensor:
    """A magnitude that about `rank` entries of the sample exceed, by its high bits."""
    above = int32(sample, 1)
    rank_there = int32_full(sample, rank)
    digits = int32(sample, 2)
    histogram = _histogram(Source(sample), nothing(sample), 1, None)
    launch(
        programs.find_digit,
        1,
        histogram,
        rank_there,
        digits[:1],
        digits[1:],
        above,
        SIZE=HIGH_SIZE,
        STEP=STEP,
        num_warps=16,
    )
    return above


def sample_of(source: Source) -> Tensor:
    """Runs of neighbours, evenly spaced."""
    stride = source.n // RUNS

    def runs(x: Tensor) -> Tensor:
        return x[: RUNS * stride].view(RUNS, stride)[:, :RUN].float()

    sample = runs(source.x)
    return (sample if source.grad is None else sample + runs(source.grad)).reshape(-1)


def nothing(like: Tensor) -> Buffer:
    """A buffer that never suffices: the tensor itself is read."""
    number = int32_full(like, 0)
    one = torch.empty(1, dtype=torch.float32, device=like.device)
    return Buffer(0, number, number, number, number, one)


def kth_limit(source: Source, buffer: Buffer, k: int) -> Limit:
    """The k-th magnitude among the candidates, or in the whole tensor."""
    rank = int32_full(source.x, k)
    found = int32(source.x, 4)
    high, left, low, ties = found[:1], found[1:2], found[2:3], found[3:]
    histogram = _histogram(source, buffer, k, None)
    launch(programs.find_digit, 1, histogram, rank, high, left, None, SIZE=HIGH_SIZE, STEP=STEP, num_warps=16)
    histogram = _histogram(source, buffer, k, high)
    launch(programs.find_digit, 1, histogram, left, low, ties, None, SIZE=LOW_SIZE, STEP=STEP, num_warps=16)
    return Limit(high, low, ties)


def count_kept(source: Source, buffer: Buffer, k: int, limit: Limit) -> Tensor:
    """Rows (above, equal) with a number for each tile."""
    number = int32(source.x, 2, over(source.n))
    launch_tiles(
        programs.count_kept, source.n, source.x, source.grad, source.n, *_places(buffer, source),
        buffer.total, k, buffer.capacity, limit.high, limit.low, number[0], number[1],
    )  # fmt: skip
    return number


def write_kept(
    source: Source,
    buffer: Buffer,
    k: int,
    limit: Limit,
    number: Tensor,
    out: tuple[Tensor, Tensor],
    residual: Tensor | None = None,
    restore: bool = False,
) -> tuple[Tensor, Tensor]:
    """The selection in order; `number` is what `count_kept` gave."""
    before = number.cumsum(1, dtype=torch.int32) - number
    launch_tiles(
        programs.write_kept, source.n, source.x, source.grad, source.n, *_places(buffer, source),
        buffer.total, k, buffer.capacity, limit.high, limit.low, limit.ties,
        before[0], before[1], *out, residual, RESTORE=restore,
    )  # fmt: skip
    return out


def empty_selection(like: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return int32(like, k), torch.empty(k, dtype=torch.float32, device=like.device)


def _places(buffer: Buffer, source: Source) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every program looks up its tile, even if the answer does not matter."""
    if buffer.capacity:
        return buffer.parts
    zeros = torch.zeros(over(source.n), dtype=torch.int32, device=source.x.device)
    return zeros, zeros, buffer.indices, buffer.values


def _histogram(source: Source, buffer: Buffer, k: int, high: Tensor | None) -> Tensor:
    size = HIGH_SIZE if high is None else LOW_SIZE
    histogram = torch.zeros(size, dtype=torch.int32, device=source.x.device)
    launch_tiles(
        programs.count_digits, source.n, source.x, source.grad, source.n,
        buffer.values, buffer.total, k, buffer.capacity, high, histogram,
    )  # fmt: skip
    return histogram
