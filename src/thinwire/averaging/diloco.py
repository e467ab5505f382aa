"""DiLoCo: an outer optimizer on top of many local steps."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.averaging.base import Outer, PeriodOptions
from thinwire.averaging.localsgd import EveryOption
from thinwire.averaging.periodic import check_outer
from thinwire.core.exchange import Exchange
from thinwire.methods.dense import Dense


@dataclass(frozen=True)
class _OuterOptions(EveryOption):
    every: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9


@dataclass(frozen=True)
class DiLoCo(PeriodOptions, _OuterOptions):
    """Many local steps, then one Nesterov step of the common model.

    With z the last common model, after `every` local steps (AdamW in the paper)
    g = (1/W) sum_l (z - x_l);  v <- mu v + g;  z <- z - lr (g + mu v);  x_i <- z.

    With `fragments` and `overlap` it is Streaming DiLoCo: parts of the model are synchronised one after the
    other, and the result of each is applied some steps later.

    Args:
        every: optimizer steps between two sync rounds.
        outer_lr, outer_momentum: lr and mu above.
        warmup, momentum, buffers, anchor, grow, longest, fragments, overlap, blend: as for all schedules,
            see docs/periodic.md.

    Example:
        >>> from thinwire.averaging import DiLoCo
        >>> str(DiLoCo(every=100, fragments=4, overlap=2, blend=0.5))
        'diloco(every=100, fragments=4, overlap=2, blend=0.5)'

    Differences from the papers: fragments are runs of neighbouring tensors instead of every n-th layer; by
    default a late result replaces a rank's parameters (`blend=0.5` mixes them, as the paper does); for few
    bits on the wire take `periodic(exchange=qsgd(bits=4), outer_lr=0.7, outer_momentum=0.9)`.
    """

    name = "diloco"
    formula = "itemsize * n / every"
    reference = (
        'Douillard et al., "DiLoCo", 2023; Douillard et al., "Streaming DiLoCo with overlapping '
        'communication", 2025'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outer(self.name, self.outer_lr, self.outer_momentum)

    @property
    def inner(self) -> Exchange:
        return Dense()

    @property
    def outer(self) -> Outer:
        return Outer(self.outer_lr, self.outer_momentum)
