"""Players look after blocks of the domain, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.distributions import kernels
from thinwire.distributions.protocol import F64, I64, FewBits, Messages, bits_for, group_sizes, visits
from thinwire.errors import PayloadError


@dataclass(frozen=True)
class Grouping(FewBits):
    """Grouping: player i reports where in block i mod t its sample lies, or that it is elsewhere.

    Blocks have B - 1 = 2^bits - 1 symbols, so t = ceil(domain / (B - 1)); the estimate is hits over the size
    of the block's group. E |p^ - p|_2^2 = (t / n) (1 - |p|_2^2), the minimax rate, with neither shared nor
    private randomness and a decoder of O(n + domain). With 2^bits > domain it is `Raw`.

    Args:
        domain: samples are in 0..domain - 1.
        bits: of a message.

    Reference: Han, Mukherjee, Ozgur, Weissman 2018; Acharya, Canonne, Tyagi 2018.
    Differences from the paper: groups by turns instead of at random, so their sizes differ by one at most.
    """

    @property
    def most_bits(self) -> int:
        return bits_for(self.domain + 1)

    @property
    def width(self) -> int:
        """The number of symbols in a block."""
        return (1 << self.bits) - 1

    @property
    def groups(self) -> int:
        """The number of blocks, and of groups of players."""
        return -(-self.domain // self.width)

    @property
    def smallest(self) -> int:
        return self.groups

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        kernels.grouping_codes(x, first, self.width, self.groups, out)

    @property
    def tally_size(self) -> int:
        return self.groups * self.width

    def add(self, codes: I64, first: int, tally: I64) -> None:
        kernels.grouping_tally(codes, first, self.width, self.groups, tally)

    def finish(self, tally: I64, parts: Sequence[Messages]) -> F64:
        if tally[self.domain :].any():
            raise PayloadError(f"a message names a symbol beyond the domain of {self.domain}")
        sizes = group_sizes(parts, self.groups)
        return tally[: self.domain] / np.repeat(sizes, self.width)[: self.domain]

    def _variance(self, p: F64, n: int) -> F64:
        sizes = visits(0, n, self.groups)
        return p * (1.0 - p) / np.repeat(sizes, self.width)[: self.domain]

    def predicted_l2(self, n: int) -> float:
        return self.groups * (1.0 - 1.0 / self.domain) / n
