"""What is to be learned, and with how much: equal on all ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from thinwire.core import checks
from thinwire.distributions.hadamard_response import check_epsilon
from thinwire.distributions.protocol import LARGEST_DOMAIN, Norm
from thinwire.errors import ConfigError

Structure = Literal["none", "monotone", "histogram"]
Network = Literal["referee", "ring"]
Model = Literal["simultaneous", "one-way", "blackboard"]


@dataclass(frozen=True)
class LearningSpec:
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
    model: Model = "blackboard"

    def __post_init__(self) -> None:
        checks.whole("learn", "domain", self.domain, 2, LARGEST_DOMAIN)
        for name, allowed in (
            ("structure", Structure),
            ("norm", Norm),
            ("network", Network),
            ("model", Model),
        ):
            checks.one_of("learn", name, getattr(self, name), get_args(allowed))
        checks.positive("learn", "bits", self.bits)
        if self.bits > 64:
            raise ConfigError(f"learn: bits (for each sample) must be 64 or fewer, not {self.bits!r}")
        if self.structure == "histogram" and (self.pieces is None or not 1 <= self.pieces <= self.domain):
            raise ConfigError(f"learn: a histogram needs pieces in 1..{self.domain}, not {self.pieces!r}")
        if self.structure != "histogram" and self.pieces is not None:
            raise ConfigError("learn: pieces belong to structure='histogram'")
        if self.epsilon is not None:
            check_epsilon(self.epsilon)

    def describe(self) -> dict[str, Any]:
        """The settings by name, for the ranks to compare."""
        return {f"learn: {name}": value for name, value in asdict(self).items()}
