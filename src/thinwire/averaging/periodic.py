"""Any exchange every few steps, with any outer step."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.averaging.base import Outer, PeriodOptions
from thinwire.averaging.localsgd import EveryOption
from thinwire.core import Exchange, checks
from thinwire.methods.topk import TopK


def check_outer(method: str, lr: object, momentum: object) -> None:
    checks.positive(method, "outer_lr", lr)
    checks.momentum(method, momentum, "outer_momentum")


@dataclass(frozen=True)
class _PeriodicOptions(EveryOption):
    exchange: Exchange = TopK()
    outer_lr: float = 1.0
    outer_momentum: float = 0.0


@dataclass(frozen=True)
class Periodic(PeriodOptions, _PeriodicOptions):
    """The general form: any exchange every few steps, and any outer step along its mean.

        after `every` local steps, with z the last common model:
            g = exchange of (z - x_i);  v <- mu v + g;  z <- z - lr (g + mu v);  x_i <- z

    The exchange keeps its residuals from one sync round to the next.

    Args:
        exchange: the method that averages `z - x_i`.
        outer_lr: lr above. With 1 and an outer momentum of 0 the common model is the mean itself.
        outer_momentum: mu above.

    Example:
        >>> import thinwire
        >>> thinwire.parse("periodic(every=4, exchange=qsgd(bits=8))").inner
        QSGD(bits=8, bucket=512, norm='max', rotate=False, reduce='auto')
    """

    name = "periodic"
    use_when = """You want a combination that no other schedule has, such as sparse or low-rank changes every
    few steps."""
    avoid_when = """`localsgd`, `pqasgd` or `diloco` is what you need. Exchanges that keep the momentum
    (`dgc`, `sketched`, `heavyball`) or let replicas differ (`a2sgd`) are refused."""
    rounds_per_step = "1 in a sync round to compare the ranks, then those of the exchange; none in between"
    compute = "that of the exchange, and a few passes over the parameters, per sync round"
    formula = ""
    formula_note = "the bytes of its exchange, once every `every` steps"

    def __post_init__(self) -> None:
        checks.exchange(self.name, "exchange", self.exchange, two_levels=True)
        super().__post_init__()
        check_outer(self.name, self.outer_lr, self.outer_momentum)

    @property
    def inner(self) -> Exchange:
        return self.exchange

    @property
    def outer(self) -> Outer:
        return Outer(self.outer_lr, self.outer_momentum)
