"""Players send the block of their sample and one sign of a Hadamard row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.distributions import kernels
from thinwire.distributions.hadamard import fwht, power_of_two
from thinwire.distributions.protocol import (
    F64,
    I64,
    Coded,
    Messages,
    bits_for,
    check_bits,
    check_domain,
    group_sizes,
    probabilities,
    visits,
)


@dataclass(frozen=True)
class RecursiveHadamard(Coded):
    """Recursive Hadamard: bits - 1 bits name the block, one is the sign H[i mod K', place in the block].

    Symbol x is at place x div 2^(bits - 1) of block x mod 2^(bits - 1), and K' is the power of two that holds
    a block. The mean of a row's signs in a block is a Walsh coefficient of p there; the inverse transform
    gives p^. E |p^ - p|_2^2 = (K' / n) (1 - |p|_2^2) where the domain is a power of two, and less where
    padding need not be estimated. The decoder costs O(n + K log K).

    Args:
        domain: samples are in 0..domain - 1.
        bits: of a message; 1 sends the sign alone.

    Reference: Chen, Kairouz, Ozgur 2020 (recursive Hadamard response), without privacy.
    Differences from the paper: rows by turns instead of by public coins; strided blocks, so that a
    domain that is no power of two fills all of them alike.
    """

    domain: int
    bits: int

    def __post_init__(self) -> None:
        check_domain(self.domain)
        check_bits(self.bits, bits_for(self.domain) + 1, "recursive Hadamard over this domain")

    @property
    def bits_per_message(self) -> int:
        return self.bits

    @property
    def blocks(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def rows(self) -> int:
        return power_of_two(-(-self.domain // self.blocks))

    @property
    def smallest(self) -> int:
        return self.rows

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        kernels.hadamard_codes(x, first, self.bits - 1, self.rows, out)

    def begin(self, parts: Sequence[Messages]) -> F64:
        return np.zeros(self.blocks * self.rows)

    def tally(self, codes: I64, first: int, into: Any) -> None:
        kernels.hadamard_tally(codes, first, self.rows, into)

    def finish(self, tally: Any, parts: Sequence[Messages]) -> F64:
        means = tally.reshape(self.blocks, self.rows) / group_sizes(parts, self.rows)
        return self._unblocked(fwht(means) / self.rows)

    def variance(self, p: F64, n: int) -> F64:
        padded = np.zeros(self.blocks * self.rows)
        padded[: self.domain] = probabilities(p, self.domain)
        blocks = padded.reshape(self.rows, self.blocks).T
        of_means = (blocks.sum(1, keepdims=True) - fwht(blocks) ** 2) / visits(0, n, self.rows)
        each = of_means.sum(1, keepdims=True) / self.rows**2
        return self._unblocked(np.broadcast_to(each, blocks.shape))

    def predicted_l2(self, n: int) -> float:
        return (self.domain / self.blocks) * (1.0 - 1.0 / self.domain) / n

    def _unblocked(self, blocks: F64) -> F64:
        return np.ascontiguousarray(blocks.T).reshape(-1)[: self.domain]
