"""DiLoCo: an outer optimizer on top of many local steps."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.averaging.base import Outer, PeriodOptions
from thinwire.averaging.localsgd import EveryOption
from thinwire.averaging.periodic import check_outer
from thinwire.core import Exchange
from thinwire.methods.dense import Dense
from thinwire.methods.efsign import EFSign
from thinwire.methods.qsgd import QSGD


@dataclass(frozen=True)
class _OuterOptions(EveryOption):
    every: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    bits: int | None = None


@dataclass(frozen=True)
class DiLoCo(PeriodOptions, _OuterOptions):
    """Every rank takes many local steps, then the common model takes one Nesterov step along their mean.

        after `every` local steps (AdamW in the paper), with z the last common model:
            g = (1/W) sum_l (z - x_l);  v <- mu v + g;  z <- z - lr (g + mu v);  x_i <- z

    With `fragments` and `overlap` it is Streaming DiLoCo: parts of the model are synchronised one after the
    other, and the result of each is applied some steps later.

    Args:
        outer_lr: lr above.
        outer_momentum: mu above.
        bits: quantise the changes to 2, 4 or 8 bits per entry (see `qsgd`), or to 1: signs with error
            feedback and a magnitude per 4,096 entries (see `efsign`). None sends them as they are.

    Example:
        >>> from thinwire.averaging import DiLoCo
        >>> str(DiLoCo(every=100, fragments=4, overlap=2))
        'diloco(every=100, fragments=4, overlap=2)'

    Differences from the paper: fragments are runs of neighbouring tensors instead of every n-th layer. A late
    result is added to what a rank's own steps have changed meanwhile; the paper mixes the two models.
    """

    name = "diloco"
    use_when = """The links between sites are very slow and the run is long: the workers synchronise once in
    hundreds of steps, each with AdamW, and the outer momentum makes up for some of the drift."""
    avoid_when = """The run has only a few sync rounds, or you need equal replicas in every step. Outer rate
    and momentum are two more settings to tune."""
    formula = """(itemsize * n if bits is None else ceil(n * bits / 8) + 4 * ceil(n / (4096 if bits == 1 else
    512))) / every"""
    reference = """Douillard et al., "DiLoCo", 2023; Douillard et al., "Streaming DiLoCo with overlapping
    communication", 2025"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outer(self.name, self.outer_lr, self.outer_momentum)

    @property
    def inner(self) -> Exchange:
        if self.bits is None:
            return Dense()
        return EFSign(bucket=4096) if self.bits == 1 else QSGD(bits=self.bits)

    @property
    def outer(self) -> Outer:
        return Outer(self.outer_lr, self.outer_momentum)
