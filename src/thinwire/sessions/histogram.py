"""The distribution of gradient magnitudes over all ranks, in 4 KB per step whatever the size of the model.

A rank has far more entries than a histogram has bins, so by the crossover of `thinwire.distributions` exact
counts are the cheapest message there is: one all-reduce of 8 bytes per bin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import cast

import torch

from thinwire.core.channel import Program
from thinwire.core.requests import added
from thinwire.core.shards import local
from thinwire.errors import ConfigError, DisagreementError
from thinwire.net.rank_info import RankInfo

# Bins follow the bits of a float32: eight to an octave, so 9 % to 13 % wide.
PER_OCTAVE = 8
LOWEST_EXPONENT = -50
OCTAVES = 64
BINS = PER_OCTAVE * OCTAVES
_MANTISSA_SHIFT = 23 - 3
_FIRST = (127 + LOWEST_EXPONENT) * PER_OCTAVE
_INFINITE_BITS = 0x7F800000
_SPECIAL = 3  # below the first bin (and zeros), above the last, not finite
_SUMS = 7  # entries, sum, sum of magnitudes, of squares; thresholds; the ratio and its square
_PIECE = 1 << 20


@dataclass(frozen=True)
class Histogram:
    """Counts of magnitudes in logarithmic bins, and the moments that a Gaussian and a Laplace are fitted by.

    - counts[j]: entries with edges()[j] <= |g| < edges()[j + 1]; `small`, `large`: below the first and above
      the last edge (zeros are small); `not_finite`: not in the moments either;
    - total: finite entries of all ranks; mean, deviation, magnitude: of the entries, and of |g|;
    - ratio, real_threshold: what share of the entries top-k is to keep, and the magnitude of the smallest
      that it really keeps, averaged over the ranks (NaN without a ratio).
    """

    counts: tuple[int, ...]
    small: int
    large: int
    not_finite: int
    total: int
    mean: float
    deviation: float
    magnitude: float
    ratio: float
    real_threshold: float

    @staticmethod
    def edges() -> tuple[float, ...]:
        """BINS + 1 of them: each octave is cut into eight equal parts."""
        steps = range(BINS + 1)
        return tuple(
            2.0 ** (LOWEST_EXPONENT + j // PER_OCTAVE) * (1.0 + j % PER_OCTAVE / PER_OCTAVE) for j in steps
        )

    def share_above(self, magnitude: float) -> float:
        """Which share of the entries has a larger magnitude; a bin's entries count as evenly spread."""
        above = float(self.large)
        for count, low, high in zip(self.counts, self.edges(), self.edges()[1:], strict=False):
            if count and high > magnitude:
                above += count * min(1.0, (high - magnitude) / (high - low))
        return above / self.total

    def threshold(self, ratio: float) -> float:
        """The magnitude that `ratio` of the entries exceed, as learned."""
        left = _checked(ratio) * self.total - self.large
        edges = self.edges()
        if left <= 0:
            return edges[-1]
        for j in range(BINS - 1, -1, -1):
            if self.counts[j] >= left:
                return edges[j + 1] - (edges[j + 1] - edges[j]) * left / self.counts[j]
            left -= self.counts[j]
        return 0.0

    def gaussian_threshold(self, ratio: float) -> float:
        """The magnitude that `ratio` of the entries would exceed, were they Gaussian with this deviation."""
        return self.deviation * NormalDist().inv_cdf(1.0 - _checked(ratio) / 2.0)

    def laplace_threshold(self, ratio: float) -> float:
        """The same for a Laplace distribution with this mean magnitude."""
        return -self.magnitude * math.log(_checked(ratio))

    def plus(self, other: Histogram) -> Histogram:
        """Both together, as of several steps. Thresholds are averaged by entries."""
        total = self.total + other.total
        mine, theirs = self.total / total, other.total / total
        mean = mine * self.mean + theirs * other.mean
        squares = mine * (self.deviation**2 + self.mean**2) + theirs * (other.deviation**2 + other.mean**2)
        return Histogram(
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            self.small + other.small,
            self.large + other.large,
            self.not_finite + other.not_finite,
            total,
            mean,
            math.sqrt(max(0.0, squares - mean**2)),
            mine * self.magnitude + theirs * other.magnitude,
            self.ratio if self.ratio == other.ratio else math.nan,
            mine * self.real_threshold + theirs * other.real_threshold,
        )


def _checked(ratio: float) -> float:
    if not 0.0 < ratio < 1.0:
        raise ConfigError(f"ratio must be between 0 and 1, not {ratio!r}")
    return ratio


def measure(
    tensors: Iterable[torch.Tensor], ratio: float | None, rank_info: RankInfo, result: list[Histogram]
) -> Program:
    """What one rank does to learn the histogram: a coroutine for a driver; appends it to `result`."""
    if ratio is not None:
        _checked(ratio)
    return _measure([local(tensor).detach().reshape(-1) for tensor in tensors], ratio, rank_info, result)


async def _measure(
    tensors: list[torch.Tensor], ratio: float | None, rank_info: RankInfo, result: list[Histogram]
) -> None:
    device = tensors[0].device if tensors else torch.device("cpu")
    row = torch.zeros(BINS + _SPECIAL + _SUMS, dtype=torch.float64, device=device)
    for tensor in tensors:
        for begin in range(0, tensor.numel(), _PIECE):
            _count(tensor[begin : begin + _PIECE], row)
    sums = row[BINS + _SPECIAL :]
    if ratio is not None and tensors:
        sums[4] = smallest_kept(torch.cat([tensor.float() for tensor in tensors]), ratio)
    share = 0.0 if ratio is None else ratio
    sums[5], sums[6] = share, share * share
    result.append(_histogram(cast("list[float]", (await added(row)).tolist()), rank_info))


def _count(piece: torch.Tensor, row: torch.Tensor) -> None:
    values = piece.float()
    bits = values.abs().view(torch.int32)
    bins = (bits >> _MANTISSA_SHIFT) - _FIRST
    bins = bins.clamp_(-1, BINS) + 1
    finite = bits < _INFINITE_BITS
    bins[~finite] = BINS + 2
    row[: BINS + _SPECIAL] += torch.bincount(bins, minlength=BINS + _SPECIAL)
    exact = torch.where(finite, values, 0.0).double()
    row[BINS + _SPECIAL] += finite.sum()
    row[BINS + _SPECIAL + 1] += exact.sum()
    row[BINS + _SPECIAL + 2] += exact.abs().sum()
    row[BINS + _SPECIAL + 3] += exact.square().sum()


def smallest_kept(flat: torch.Tensor, ratio: float) -> float:
    """The magnitude of the smallest entry that an exact top-k keeps."""
    from thinwire import kernels

    _, values = kernels.topk(flat, max(1, round(ratio * flat.numel())))
    return float(values.abs().min())


def _histogram(row: list[float], rank_info: RankInfo) -> Histogram:
    entries, total, magnitudes, squares, thresholds, ratios, ratio_squares = row[BINS + _SPECIAL :]
    if rank_info.size * ratio_squares - ratios**2 > 1e-9 * max(1e-9, ratio_squares):
        raise DisagreementError("the ranks ask for histograms with different ratios; give them the same")
    if not entries and not row[BINS + 2]:
        raise ConfigError("there is no gradient on any rank: call histogram() after backward()")
    finite = max(entries, 1.0)
    mean = total / finite
    ratio = ratios / rank_info.size
    return Histogram(
        tuple(int(count) for count in row[1 : BINS + 1]),
        int(row[0]),
        int(row[BINS + 1]),
        int(row[BINS + 2]),
        int(entries),
        mean,
        math.sqrt(max(0.0, squares / finite - mean**2)),
        magnitudes / finite,
        ratio if ratios else math.nan,
        thresholds / rank_info.size if ratios else math.nan,
    )
