"""SparseLoCo: sparse changes in few bits, with a residual that serves as outer momentum."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.averaging.base import Outer, PeriodOptions
from thinwire.averaging.localsgd import EveryOption
from thinwire.averaging.periodic import check_outer
from thinwire.core import Exchange
from thinwire.methods.qsgd import QSGD
from thinwire.methods.topk import TopK


@dataclass(frozen=True)
class _SparseOptions(EveryOption):
    every: int = 15
    ratio: float = 0.02
    bits: int = 2
    decay: float = 0.95
    chunk: int = 4096
    outer_lr: float = 1.0


@dataclass(frozen=True)
class SparseLoCo(PeriodOptions, _SparseOptions):
    """Every few steps, the largest entries of each replica's accumulated change are sent in a few bits.

        after `every` local steps (AdamW in the paper), with z the last common model:
            u_i = e_i + z - x_i;  c_i = Q(top_k of every chunk of u_i);  e_i = beta (u_i - c_i)
            z <- z - lr (1/W) sum_l c_l;  x_i <- z

    What was not sent stays in the residual, so that a direction that lasts is sent in the end. The residual
    takes the place of an outer momentum, and beta is its memory.

    Args:
        ratio: the share of the entries that is sent.
        bits: the bits of an entry that is sent: 1, 2, 4 or 8 (see `qsgd`).
        decay: beta above.
        chunk: the number of consecutive entries from which k = max(1, ratio * chunk) are selected.
        outer_lr: lr above.

    Example:
        >>> from thinwire.averaging import SparseLoCo
        >>> str(SparseLoCo(every=30).inner)
        'topk(ratio=0.02, values=qsgd(bits=2), chunk=4096, decay=0.95)'

    Differences from the paper: the values are rounded at random to -m, 0 or m with two bits. Indices take
    about 2 + log2(1 / ratio) bits each instead of 12.
    """

    name = "sparseloco"
    use_when = """Links between sites are so slow that even a few bits per parameter are too many: far below
    one percent of the bytes of `dense`, with AdamW on every worker."""
    avoid_when = """The run is short: with few sync rounds most of the change is still in the residuals at the
    end."""
    rounds_per_step = "1 in a sync round to compare the ranks, 1 for the entries; none in between"
    compute = "one pass to select and to update the residual, and a few over the parameters, per sync round"
    formula = "(index_bytes(n, k) + 4 + ceil(k * bits / 8) + 4 * ceil(k / 512)) / every"
    formula_note = "where k is ratio times the entries of every chunk, at least one"
    reference = """Sarfi, Therien, Lidin and Belilovsky, "Communication efficient LLM pre-training with
    SparseLoCo", 2025"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outer(self.name, self.outer_lr, 0.0)

    @property
    def inner(self) -> Exchange:
        codec = QSGD(bits=self.bits)
        return TopK(ratio=self.ratio, values=codec, chunk=self.chunk, decay=self.decay)

    @property
    def outer(self) -> Outer:
        return Outer(self.outer_lr)
