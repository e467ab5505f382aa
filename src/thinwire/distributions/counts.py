"""Many samples at each server: exact counts, added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.core import checks
from thinwire.distributions import kernels
from thinwire.distributions.protocol import CHUNK, F64, I64, Additive, Sums, check_samples
from thinwire.errors import ConfigError, PayloadError


def counted(samples: Any, domain: int) -> I64:
    """How often each symbol occurs."""
    x = check_samples(samples, domain)
    counts = np.zeros(domain, np.int64)
    for low in range(0, len(x), CHUNK):
        kernels.count(x[low : low + CHUNK].astype(np.int64, copy=False), counts)
    return counts


@dataclass(frozen=True)
class ExactCounts(Additive):
    """Exact counts: `width` bits for each symbol and server, whatever the number of samples.

    All samples of all servers are used: E |p^ - p|_2^2 = (1 - |p|_2^2) / n. A ring all-reduce moves
    2 width domain (W - 1) / W bits through each of W ranks, a gather of N messages of b bits each
    (W - 1) N b: counts are cheaper from N = 64 domain / (b W) samples per rank on.

    Args:
        domain: samples are in 0..domain - 1.
        width: bits of a count, 32 or 64; a total that does not fit is refused.
    """

    width: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("ExactCounts", "width", self.width, (32, 64))

    @property
    def bits_per_message(self) -> int:
        return self.width * self.domain

    def empty(self) -> Any:
        return np.zeros(self.domain, np.int32 if self.width == 32 else np.int64)

    def encode(self, samples: Any, rng: np.random.Generator | None = None, first: int = 0) -> Sums:
        return self.sums_of(counted(samples, self.domain))

    def sums_of(self, counts: I64) -> Sums:
        """The message for counts that are known already."""
        total = int(counts.sum())
        self.check_count(total)
        return Sums(counts.astype(self.empty().dtype), total)

    def check_count(self, n: int) -> None:
        super().check_count(n)
        if n >= 1 << (self.width - 1):
            raise ConfigError(f"{n:,} samples do not fit counts of {self.width} bits: use width=64")

    def estimate_sum(self, sums: Sums) -> F64:
        if sums.table.min() < 0 or int(sums.table.sum(dtype=np.int64)) != sums.count:
            raise PayloadError(f"the counts do not add up to {sums.count}, the number of samples")
        return sums.table / sums.count

    def _variance(self, p: F64, n: int) -> F64:
        return p * (1.0 - p) / n

    def predicted_l2(self, n: int) -> float:
        return (1.0 - 1.0 / self.domain) / n


def crossover(domain: int, bits: float, servers: int) -> float:
    """From so many samples per rank on, a ring all-reduce of counts moves fewer bytes than messages do."""
    return 64.0 * domain / (bits * servers)
