"""Players simulate true samples of p at the referee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from thinwire.distributions import kernels
from thinwire.distributions.protocol import (
    CHUNK,
    F64,
    I64,
    Coded,
    Messages,
    bits_for,
    check_bits,
    check_domain,
    probabilities,
)
from thinwire.errors import ConfigError, PayloadError


@dataclass
class _Tally:
    state: I64
    accepted: I64
    found: int


@dataclass(frozen=True)
class SimulateAndInfer(Coded):
    """Simulate-and-infer: the referee gets exact samples of p, for tests that need them.

    Each symbol is split in two by a private coin, and the 2 x domain halves are cut into t blocks of
    2^bits - 1, two players for each; both report the place of their sample in the block, or that it
    is elsewhere. A round of 2 t players yields x if exactly one of the first players has a hit, and the
    block's second player has none: with block masses P_j that is p_x prod_j (1 - P_j), so what is accepted is
    distributed as p. The two halves of a symbol never share a block, so no P_j exceeds 1/2 and at
    least a quarter of the rounds yields a sample.

    E |p^ - p|_2^2 is (1 - |p|_2^2) over the number accepted: ten times more than `Grouping` needs.

    Args:
        domain: samples are in 0..domain - 1.
        bits: of a message; 2^bits - 1 may not exceed the domain.

    Reference: Acharya, Canonne, Tyagi 2018. Differences from the paper: the construction was rebuilt from its
    description; the order of players is fixed.
    """

    domain: int
    bits: int
    private_coins: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_domain(self.domain)
        most = bits_for(self.domain + 2) - 1  # the largest b with 2^b - 1 <= domain
        check_bits(self.bits, max(1, most), "simulate-and-infer over this domain (else send Raw samples)")

    @property
    def bits_per_message(self) -> int:
        return self.bits

    @property
    def width(self) -> int:
        return (1 << self.bits) - 1

    @property
    def groups(self) -> int:
        return -(-2 * self.domain // self.width)

    @property
    def smallest(self) -> int:
        return 2 * self.groups

    def samples(self, messages: Messages | Sequence[Messages]) -> I64:
        """The samples that the referee accepts; independent, and distributed as p."""
        tally = self._tally_of(messages)
        return tally.accepted[: tally.found]

    def _tally_of(self, messages: Messages | Sequence[Messages]) -> _Tally:
        parts = sorted([messages] if isinstance(messages, Messages) else messages, key=lambda m: m.first)
        tally = self.begin(parts)
        codes = np.empty(CHUNK, np.int64)
        for part in parts:
            self._read(part, codes, tally)
        return tally

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        halves = np.empty_like(out)
        kernels.split(x, first, key, self.domain, halves)
        kernels.grouping_codes(halves, first, self.width, self.groups, out)

    def begin(self, parts: Sequence[Messages]) -> _Tally:
        expected = 0
        for part in parts:
            if part.first != expected:
                raise PayloadError(f"messages of players {expected}..{part.first} are missing or doubled")
            expected += part.count
        return _Tally(np.zeros(4, np.int64), np.empty(expected // self.smallest + 1, np.int64), 0)

    def tally(self, codes: I64, first: int, into: Any) -> None:
        into.found = kernels.simulate(
            codes, first, self.width, self.groups, self.domain, into.state, into.accepted, into.found
        )

    def finish(self, tally: Any, parts: Sequence[Messages]) -> F64:
        if not tally.found:
            raise ConfigError(f"{self} accepted no sample: it needs {4 * self.smallest:,} messages or more")
        return np.bincount(tally.accepted[: tally.found], minlength=self.domain) / tally.found

    def acceptance(self, p: F64) -> float:
        """The probability that a round yields a sample."""
        p = probabilities(p, self.domain)
        padded = np.zeros(self.groups * self.width)
        padded[: self.domain] = padded[self.domain : 2 * self.domain] = p / 2.0
        masses: F64 = padded.reshape(self.groups, self.width).sum(1)
        return float(np.prod(1.0 - masses))

    def variance(self, p: F64, n: int) -> F64:
        p = probabilities(p, self.domain)
        return p * (1.0 - p) * self._inverse(n // self.smallest, self.acceptance(p))

    def _inverse(self, rounds: int, acceptance: float) -> float:
        """The mean of 1 / accepted, to the second order."""
        mean = max(rounds * acceptance, 1e-9)
        return (1.0 + (1.0 - acceptance) / mean) / mean

    def predicted_l2(self, n: int) -> float:
        rounds, acceptance = n // self.smallest, (1.0 - 1.0 / self.groups) ** self.groups
        return (1.0 - 1.0 / self.domain) * self._inverse(rounds, acceptance)
