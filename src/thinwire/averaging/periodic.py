"""Any exchange every few steps, with any outer step."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.averaging.base import Outer, PeriodOptions
from thinwire.averaging.localsgd import EveryOption
from thinwire.core import checks
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError
from thinwire.methods.topk import TopK


def check_outer(method: str, lr: object, momentum: object) -> None:
    checks.positive(method, "outer_lr", lr)
    if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ConfigError(
            f"{method}: outer_momentum must be a number from 0 up and below 1, not {momentum!r}"
        )


@dataclass(frozen=True)
class _PeriodicOptions(EveryOption):
    exchange: Exchange = TopK()
    outer_lr: float = 1.0
    outer_momentum: float = 0.0


@dataclass(frozen=True)
class Periodic(PeriodOptions, _PeriodicOptions):
    """The general form: any exchange every few steps, and any outer step along its mean.

    With z the last common model, after `every` local steps
    g = exchange of (z - x_i);  v <- mu v + g;  z <- z - lr (g + mu v);  x_i <- z.
    Residuals of the exchange are kept from one sync round to the next.

    Args:
        every: optimizer steps between two sync rounds.
        exchange: the method that averages `z - x_i`.
        outer_lr, outer_momentum: lr and mu above; 1 and 0 give the mean itself.
        warmup, momentum, buffers, anchor, grow, longest, fragments, overlap, blend: as for all schedules,
            see docs/periodic.md.

    Example:
        >>> import thinwire
        >>> thinwire.parse("periodic(every=4, exchange=qsgd(bits=8))").inner
        QSGD(bits=8, bucket=512, norm='max', reduce='auto')
    """

    name = "periodic"
    formula = ""
    formula_note = "the bytes of its exchange, once every `every` steps"

    def __post_init__(self) -> None:
        checks.exchange(self.name, "exchange", self.exchange)
        super().__post_init__()
        check_outer(self.name, self.outer_lr, self.outer_momentum)

    @property
    def inner(self) -> Exchange:
        return self.exchange

    @property
    def outer(self) -> Outer:
        return Outer(self.outer_lr, self.outer_momentum)
