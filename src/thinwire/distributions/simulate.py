"""Players simulate true samples of p at the referee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.distributions import kernels
from thinwire.distributions.protocol import F64, I64, FewBits, Messages, bits_for, listed, total_count
from thinwire.errors import ConfigError, PayloadError


@dataclass(frozen=True)
class SimulateAndInfer(FewBits):
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

    private_coins: ClassVar[bool] = True

    @property
    def most_bits(self) -> int:
        """The largest b with 2^b - 1 <= domain."""
        return max(1, bits_for(self.domain + 2) - 1)

    @property
    def width(self) -> int:
        """The number of symbols that a message can name."""
        return (1 << self.bits) - 1

    @property
    def groups(self) -> int:
        """The number of groups that players take turns in."""
        return -(-2 * self.domain // self.width)

    @property
    def smallest(self) -> int:
        return 2 * self.groups

    def samples(self, messages: Messages | Sequence[Messages]) -> I64:
        """The samples that the referee accepts; independent, and distributed as p."""
        return self._accepted(self.tally(listed(messages)))

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        halves = np.empty_like(out)
        kernels.split(x, first, key, self.domain, halves)
        kernels.grouping_codes(halves, first, self.width, self.groups, out)

    @property
    def tally_size(self) -> int:
        """The state of a round; accepted samples follow."""
        return kernels.SIMULATION_STATE

    def empty(self, parts: Sequence[Messages]) -> I64:
        expected = 0
        for part in parts:  # without gaps, so that no more rounds end than there is room for
            if part.first != expected:
                raise PayloadError(f"messages of players {expected}..{part.first} are missing or doubled")
            expected += part.count
        return np.zeros(self.tally_size + total_count(parts) // self.smallest + 1, np.int64)

    def add(self, codes: I64, first: int, tally: I64) -> None:
        kernels.simulate(codes, first, self.width, self.groups, self.domain, tally)

    def _accepted(self, tally: I64) -> I64:
        return tally[self.tally_size :][: tally[0]]

    def finish(self, tally: I64, parts: Sequence[Messages]) -> F64:
        accepted = self._accepted(tally)
        if not len(accepted):
            raise ConfigError(f"{self} accepted no sample: it needs {4 * self.smallest:,} messages or more")
        return np.bincount(accepted, minlength=self.domain) / len(accepted)

    def acceptance(self, p: F64) -> float:
        """The probability that a round yields a sample."""
        padded = np.zeros(self.groups * self.width)
        padded[: self.domain] = padded[self.domain : 2 * self.domain] = p / 2.0
        masses: F64 = padded.reshape(self.groups, self.width).sum(1)
        return float(np.prod(1.0 - masses))

    def _variance(self, p: F64, n: int) -> F64:
        return p * (1.0 - p) * self._inverse(n // self.smallest, self.acceptance(p))

    def _inverse(self, rounds: int, acceptance: float) -> float:
        """The mean of 1 / accepted, to the second order."""
        mean = max(rounds * acceptance, 1e-9)
        return (1.0 + (1.0 - acceptance) / mean) / mean

    def predicted_l2(self, n: int) -> float:
        rounds, acceptance = n // self.smallest, (1.0 - 1.0 / self.groups) ** self.groups
        return (1.0 - 1.0 / self.domain) * self._inverse(rounds, acceptance)
