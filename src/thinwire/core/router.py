"""Which exchange serves which tensor."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.exchange import Exchange
from thinwire.core.layout import Slot
from thinwire.errors import ConfigError
from thinwire.methods.dense import Dense

# Biases and norm scales are one-dimensional and never this long; a flattened model is.
LONGEST_SMALL_VECTOR = 65_536


@dataclass(frozen=True)
class Router:
    """A rule of the method itself comes first; small tensors and short vectors go dense; then the method."""

    method: Exchange
    dense_below: int = 1024
    dense: Exchange = Dense()

    def __post_init__(self) -> None:
        if self.dense_below < 0:
            raise ConfigError(f"dense_below must not be negative, not {self.dense_below}")

    def exchange_for(self, slot: Slot) -> Exchange:
        ruled = self.method.rule_for(slot)
        if ruled is not None:
            return ruled if ruled.accepts(slot) else ruled.beside() or self.dense
        method = self.method.default_exchange
        if method.traits.elementwise:
            return method
        short_vector = len(slot.shape) <= 1 and slot.numel <= LONGEST_SMALL_VECTOR
        small = slot.numel < self.dense_below or (short_vector and self.dense_below > 0)
        if small or not method.accepts(slot):
            return method.beside() or self.dense
        return method
