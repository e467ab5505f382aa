"""Local privacy: players send a column of a Hadamard matrix, or one bit of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.distributions import kernels
from thinwire.distributions.hadamard import fwht, power_of_two
from thinwire.distributions.protocol import F64, I64, Coded, Messages, bits_for, total_count
from thinwire.distributions.recursive_hadamard import HadamardSigns
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

    epsilon: float
    private_coins: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epsilon(self.epsilon)

    @property
    def contrast(self) -> float:
        """c = (e^epsilon - 1) / (e^epsilon + 1)."""
        return math.tanh(self.epsilon / 2.0)


@dataclass(frozen=True)
class HadamardResponse(_Private):
    """Hadamard response: every message is epsilon-locally private.

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
        """The size of the Hadamard matrix: a power of two above the domain."""
        return power_of_two(self.domain + 1)

    @property
    def bits_per_message(self) -> int:
        return bits_for(self.size)

    @property
    def tally_size(self) -> int:
        return self.size

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        other = np.uint64(mix64(int(key) ^ SPLIT_STEP))
        kernels.response_codes(x, first, key, other, truth_of(self.epsilon), self.size, out)

    def add(self, codes: I64, first: int, tally: I64) -> None:
        kernels.count(codes, tally)

    def finish(self, tally: I64, parts: Sequence[Messages]) -> F64:
        return fwht(tally / total_count(parts))[1 : self.domain + 1] / self.contrast

    def _variance(self, p: F64, n: int) -> F64:
        return (1.0 / self.contrast**2 - p**2) / n

    def predicted_l2(self, n: int) -> float:
        return (self.domain / self.contrast**2 - 1.0 / self.domain) / n


@dataclass(frozen=True)
class OneBitHadamard(_Private, HadamardSigns):
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
    def blocks(self) -> int:
        return 1

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        super().codes(x, first, key, out)
        kernels.flip(first, key, truth_of(self.epsilon), out)

    def _sign_energy(self, blocks: F64) -> float:
        return 1.0 / self.contrast**2

    def predicted_l2(self, n: int) -> float:
        return self.domain * (1.0 / self.contrast**2 - 1.0 / self.domain) / n
