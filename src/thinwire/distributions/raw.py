"""Every player sends its sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.distributions import kernels
from thinwire.distributions.protocol import F64, I64, Coded, Messages, bits_for, total_count


@dataclass(frozen=True)
class Raw(Coded):
    """Raw samples: ceil(log2 domain) bits each, and frequencies.

    E |p^ - p|_2^2 = (1 - |p|_2^2) / n. Nothing beats it for a sample, and no protocol with fewer bits does
    much better for a bit where the distribution has no structure.

    Args:
        domain: samples are in 0..domain - 1.
    """

    @property
    def bits_per_message(self) -> int:
        return bits_for(self.domain)

    @property
    def code_limit(self) -> int:
        return self.domain

    @property
    def tally_size(self) -> int:
        return self.domain

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        out[:] = x

    def add(self, codes: I64, first: int, tally: I64) -> None:
        kernels.count(codes, tally)

    def finish(self, tally: I64, parts: Sequence[Messages]) -> F64:
        return tally / total_count(parts)

    def _variance(self, p: F64, n: int) -> F64:
        return p * (1.0 - p) / n

    def predicted_l2(self, n: int) -> float:
        return (1.0 - 1.0 / self.domain) / n
