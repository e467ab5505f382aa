"""Players send a few bits of a public hash of their sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.distributions import kernels
from thinwire.distributions.hadamard import fwht, power_of_two
from thinwire.distributions.protocol import F64, I64, FewBits, Messages, bits_for, total_count
from thinwire.errors import ConfigError
from thinwire.kernels.generator import mix64

MOST_BITS = 8
# Additions the decoder may need: some fifteen seconds on one core.
WORK_LIMIT = 2**31


@dataclass(frozen=True)
class PublicHash(FewBits):
    """Public random hashing: player i sends h_i(x), `bits` bits of a hash that all know.

    With B = 2^bits and N_x the number of players whose message is what they would have sent for x,

        p^_x = (B N_x / n - 1) / (B - 1)
        Var p^_x = (B / (B - 1))^2 q_x (1 - q_x) / n,   q_x = p_x + (1 - p_x) / B

    Counting N_x for each x in turn would cost n x domain. Here h_i(x) = A_i x over the field of two
    elements, with a random Hankel matrix of bits x log2(domain) from (seed, i): two symbols collide with
    probability 1 / B exactly, which is all the estimator needs, and "message i fits x" is a sum of 2^bits
    Walsh functions of x. So the decoder adds 2^bits signs for each message to a spectrum, and one fast
    Walsh-Hadamard transform turns it into all N_x: n 2^bits + K log2 K additions, K the domain's next power
    of two. More than 2^31 are refused.

    Args:
        domain: samples are in 0..domain - 1.
        bits: of a message.
        seed: of the hashes: public, and chosen without a look at the samples.

    Reference: Yuan, Guo, Huang, refinement methods for distributed distribution estimation.
    Differences from the paper: the linear hashes and the decoder above.
    """

    seed: int = 0

    @property
    def most_bits(self) -> int:
        return min(MOST_BITS, bits_for(self.domain))

    @property
    def buckets(self) -> int:
        """B, the number of values of a hash."""
        return 1 << self.bits

    def work(self, n: int) -> int:
        """Additions to decode n messages."""
        return n * self.buckets + self.tally_size * bits_for(self.tally_size)

    def check_count(self, n: int) -> None:
        super().check_count(n)
        if self.work(n) > WORK_LIMIT:
            raise ConfigError(
                f"decoding {n:,} hashes of {self.bits} bits takes {self.work(n):.1e} additions, more than "
                f"{WORK_LIMIT:.1e}: use fewer bits, or Grouping, whose decoder takes {n + self.domain:,}"
            )

    @property
    def _key(self) -> np.uint64:
        return np.uint64(mix64(self.seed))

    @property
    def tally_size(self) -> int:
        return power_of_two(self.domain)

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        kernels.hash_codes(x, first, self._key, self.bits, np.empty(len(x), np.uint64), out)

    def add(self, codes: I64, first: int, tally: I64) -> None:
        kernels.hash_tally(codes, first, self._key, self.bits, np.uint64(self.tally_size - 1), tally)

    def finish(self, tally: I64, parts: Sequence[Messages]) -> F64:
        fits = fwht(tally.astype(np.float64))[: self.domain] / self.buckets
        return (self.buckets * fits / total_count(parts) - 1.0) / (self.buckets - 1)

    def _variance(self, p: F64, n: int) -> F64:
        q = p + (1.0 - p) / self.buckets
        return (self.buckets / (self.buckets - 1)) ** 2 * q * (1.0 - q) / n

    def predicted_l2(self, n: int) -> float:
        q = 1.0 / self.domain + (1.0 - 1.0 / self.domain) / self.buckets
        return self.domain * (self.buckets / (self.buckets - 1)) ** 2 * q * (1.0 - q) / n
