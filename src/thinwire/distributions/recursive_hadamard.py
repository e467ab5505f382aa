"""Players send the block of their sample and one sign of a Hadamard row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.distributions import kernels
from thinwire.distributions.hadamard import fwht, power_of_two
from thinwire.distributions.protocol import F64, I64, Coded, FewBits, Messages, bits_for, group_sizes, visits


@dataclass(frozen=True)
class HadamardSigns(Coded):
    """Player i sends a block and the sign H[i mod rows, place in the block].

    Symbol x is at place x div `blocks` of block x mod `blocks`, both powers of two. The mean of a row's signs
    in a block is a Walsh coefficient of p there, times `contrast`; the inverse transform gives p^.
    """

    @property
    @abstractmethod
    def blocks(self) -> int:
        """The number of blocks of the domain."""

    @property
    def contrast(self) -> float:
        """By what factor noise in the signs shrinks their means."""
        return 1.0

    @property
    def rows(self) -> int:
        """The number of rows of the Hadamard matrix of a block."""
        return power_of_two(-(-self.domain // self.blocks))

    @property
    def smallest(self) -> int:
        return self.rows

    @property
    def tally_size(self) -> int:
        return self.blocks * self.rows

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        kernels.hadamard_codes(x, first, self.blocks.bit_length() - 1, self.rows, out)

    def add(self, codes: I64, first: int, tally: I64) -> None:
        kernels.hadamard_tally(codes, first, self.rows, tally)

    def finish(self, tally: I64, parts: Sequence[Messages]) -> F64:
        sizes = group_sizes(parts, self.rows) * self.contrast
        return self._by_symbol(fwht(tally.reshape(self.blocks, self.rows) / sizes) / self.rows)

    def _variance(self, p: F64, n: int) -> F64:
        padded = np.zeros(self.blocks * self.rows)
        padded[: self.domain] = p
        blocks = padded.reshape(self.rows, self.blocks).T
        of_means = (self._sign_energy(blocks) - fwht(blocks) ** 2) / visits(0, n, self.rows)
        each = of_means.sum(1, keepdims=True) / self.rows**2
        return self._by_symbol(np.broadcast_to(each, blocks.shape))

    @abstractmethod
    def _sign_energy(self, blocks: F64) -> F64 | float:
        """The second moment of an unbiased sign, by block."""

    def _by_symbol(self, blocks: F64) -> F64:
        return np.ascontiguousarray(blocks.T).reshape(-1)[: self.domain]


@dataclass(frozen=True)
class RecursiveHadamard(HadamardSigns, FewBits):
    """Recursive Hadamard: bits - 1 bits name the block, one is the sign H[i mod K', place in the block].

    Symbol x is at place x div 2^(bits - 1) of block x mod 2^(bits - 1), and K' is the power of two that holds
    a block. E |p^ - p|_2^2 = (K' / n) (1 - |p|_2^2) where the domain is a power of two, and less where
    padding need not be estimated. The decoder costs O(n + K log K).

    Args:
        domain: samples are in 0..domain - 1.
        bits: of a message; 1 sends the sign alone.

    Reference: Chen, Kairouz, Ozgur 2020 (recursive Hadamard response), without privacy.
    Differences from the paper: rows by turns instead of by public coins; strided blocks, so that a
    domain that is no power of two fills all of them alike.
    """

    @property
    def most_bits(self) -> int:
        return bits_for(self.domain) + 1

    @property
    def blocks(self) -> int:
        return 1 << (self.bits - 1)

    def _sign_energy(self, blocks: F64) -> F64:
        return blocks.sum(1, keepdims=True)

    def predicted_l2(self, n: int) -> float:
        return (self.domain / self.blocks) * (1.0 - 1.0 / self.domain) / n
