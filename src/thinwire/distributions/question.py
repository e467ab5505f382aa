"""What is to be learned, and with how much: equal on all ranks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from thinwire.distributions.hadamard_response import check_epsilon
from thinwire.distributions.protocol import Norm, check_domain
from thinwire.errors import ConfigError

Structure = Literal["none", "monotone", "histogram"]
Network = Literal["referee", "ring"]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Question:
    """See `learn` for the fields."""

    domain: int
    bits: float
    structure: Structure
    pieces: int | None
    norm: Norm
    epsilon: float | None
    increasing: bool
    seed: int
    network: Network

    def __post_init__(self) -> None:
        check_domain(self.domain)
        for name, allowed in (("structure", Structure), ("norm", Norm), ("network", Network)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"{name} is one of {get_args(allowed)}, not {getattr(self, name)!r}")
        if not _number(self.bits) or not 0 < self.bits <= 64:
            raise ConfigError(f"bits (for each sample) must be a number in (0, 64], not {self.bits!r}")
        if self.structure == "histogram" and (self.pieces is None or not 1 <= self.pieces <= self.domain):
            raise ConfigError(f"a histogram needs pieces in 1..{self.domain}, not {self.pieces!r}")
        if self.structure != "histogram" and self.pieces is not None:
            raise ConfigError("pieces belong to structure='histogram'")
        if self.epsilon is not None:
            check_epsilon(self.epsilon)

    def describe(self) -> dict[str, Any]:
        return {f"learn: {name}": value for name, value in asdict(self).items()}
