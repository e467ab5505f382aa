"""Every player sends its sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.distributions import kernels
from thinwire.distributions.protocol import F64, I64, Coded, Messages, bits_for, check_domain, probabilities


@dataclass(frozen=True)
class Raw(Coded):
    """Raw samples: ceil(log2 domain) bits each, and frequencies.

    E |p^ - p|_2^2 = (1 - |p|_2^2) / n. Nothing beats it for a sample, and no protocol with fewer bits does
    much better for a bit where the distribution has no structure.

    Args:
        domain: samples are in 0..domain - 1.
    """

    domain: int

    def __post_init__(self) -> None:
        check_domain(self.domain)

    @property
    def bits_per_message(self) -> int:
        return bits_for(self.domain)

    @property
    def code_limit(self) -> int:
        return self.domain

    def codes(self, x: I64, first: int, key: np.uint64, out: I64) -> None:
        out[:] = x

    def begin(self, parts: Sequence[Messages]) -> I64:
        return np.zeros(self.domain, np.int64)

    def tally(self, codes: I64, first: int, into: Any) -> None:
        kernels.count(codes, into)

    def finish(self, tally: Any, parts: Sequence[Messages]) -> F64:
        return tally / sum(part.count for part in parts)

    def variance(self, p: F64, n: int) -> F64:
        p = probabilities(p, self.domain)
        return p * (1.0 - p) / n

    def predicted_l2(self, n: int) -> float:
        return (1.0 - 1.0 / self.domain) / n
