"""Local privacy: players send a column of a Hadamard matrix, or one bit of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from thinwire.distributions import kernels
from thinwire.distributions.hadamard import fwht, power_of_two
from thinwire.distributions.protocol import (
    F64,
    I64,
    Coded,
    Messages,
    bits_for,
    check_domain,
    group_sizes,
    probabilities,
    visits,
)
from thinwire.errors import ConfigError
from thinwire.kernels.generator import SPLIT_STEP, mix64


def check_epsilon(epsilon: float) -> None:
    if not 0.0 < epsilon < 100.0:
        raise ConfigError(f"epsilon must be a number in (0, 100), not {epsilon!r}")


def truth_of(epsilon: float) -> float:
    """The probability of an honest answer, e^epsilon / (1 + e^epsilon)."""
    return 1.0 / (1.0 + math.exp(-epsilon))


@dataclass(frozen=True)
class _Private(Coded):
    """What both protocols with local privacy have."""

    domain: int
    epsilon: float
    private_coins: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_domain(self.domain)
        check_epsilon(self.epsilon)

    @property
    def contrast(self) -> float:
        """c = (e^epsilon - 1) / (e^epsilon + 1)."""
        return math.tanh(self.epsilon / 2.0)


@dataclass(frozen=True)
class HadamardResponse(_Private):
    """Hadamard response: a message is epsilon-locally private, whoever reads it.

    K is the smallest power of two above the domain. A player with sample x sends a column y that is uniform
    among those with H[x + 1, y] = +1, with probability e^epsilon / (1 + e^epsilon), or among the others. With
    c = (e^epsilon - 1) / (e^epsilon + 1),

        p^_x = H(frequencies of y)[x + 1] / c,   E |p^ - p|_2^2 = (domain / c^2 - |p|_2^2) / n

    The coins must stay private: leave `rng` out of `encode` to take them from the operating system. A server
    that answers for several samples of one person spends epsilon for each.

    Args:
        domain: samples are in 0..domain - 1.
        epsilon: of local differential privacy, above 0.

    Reference: Acharya, Sun, Zhang 2019. Differences from the paper: none for one block of the domain, which
    is the variant for small epsilon.
    """

    @property
    def size(self) -> int:
        return power_of_two(self.domain + 1)

    @property
    def bits_per_message(self) -> int:
        return bits_for(self.size)

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        other = np.uint64(mix64(int(key) ^ SPLIT_STEP))
        kernels.response_codes(x, first, key, other, truth_of(self.epsilon), self.size, out)

    def begin(self, parts: Sequence[Messages]) -> I64:
        return np.zeros(self.size, np.int64)

    def tally(self, codes: I64, first: int, into: Any) -> None:
        kernels.count(codes, into)

    def finish(self, tally: Any, parts: Sequence[Messages]) -> F64:
        frequencies = tally / sum(part.count for part in parts)
        return fwht(frequencies)[1 : self.domain + 1] / self.contrast

    def variance(self, p: F64, n: int) -> F64:
        return (1.0 / self.contrast**2 - probabilities(p, self.domain) ** 2) / n

    def predicted_l2(self, n: int) -> float:
        return (self.domain / self.contrast**2 - 1.0 / self.domain) / n


@dataclass(frozen=True)
class OneBitHadamard(_Private):
    """One-bit Hadamard: player i sends H[i mod K, x], turned around with probability 1 / (1 + e^epsilon).

    Epsilon-locally private with one bit and no public coin. With c = (e^epsilon - 1) / (e^epsilon + 1) and a
    domain that is a power of two, E |p^ - p|_2^2 = (K / n) (1 / c^2 - |p|_2^2).

    Args:
        domain: samples are in 0..domain - 1.
        epsilon: of local differential privacy, above 0.

    Reference: Acharya, Sun 2019. Differences from the paper: none known.
    """

    @property
    def bits_per_message(self) -> int:
        return 1

    @property
    def rows(self) -> int:
        return power_of_two(self.domain)

    @property
    def smallest(self) -> int:
        return self.rows

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        kernels.hadamard_codes(x, first, 0, self.rows, out)
        kernels.flip(first, key, truth_of(self.epsilon), out)

    def begin(self, parts: Sequence[Messages]) -> F64:
        return np.zeros(self.rows)

    def tally(self, codes: I64, first: int, into: Any) -> None:
        kernels.hadamard_tally(codes, first, self.rows, into)

    def finish(self, tally: Any, parts: Sequence[Messages]) -> F64:
        means = tally / (group_sizes(parts, self.rows) * self.contrast)
        return fwht(means)[: self.domain] / self.rows

    def variance(self, p: F64, n: int) -> F64:
        padded = np.zeros(self.rows)
        padded[: self.domain] = probabilities(p, self.domain)
        of_means = (1.0 / self.contrast**2 - fwht(padded) ** 2) / visits(0, n, self.rows)
        return np.full(self.domain, of_means.sum() / self.rows**2)

    def predicted_l2(self, n: int) -> float:
        return self.domain * (1.0 / self.contrast**2 - 1.0 / self.domain) / n
