"""Periodic quantised averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.averaging.base import PeriodOptions
from thinwire.averaging.localsgd import EveryOption
from thinwire.core.exchange import Exchange
from thinwire.methods.qsgd import QSGD


@dataclass(frozen=True)
class _QuantiserOptions(EveryOption):
    bits: int = 4
    norm: Literal["max", "l2"] = "max"
    bucket: int = 512
    reduce: Literal["auto", "gather", "twoshot"] = "auto"


@dataclass(frozen=True)
class PQASGD(PeriodOptions, _QuantiserOptions):
    """The change of each replica since the last sync round is quantised at random and averaged.

    With z the last common model, in each step x_i <- x_i - gamma g_i(x_i), and after `every` of them
    z <- z + (1/W) sum_l Q(x_l - z);  x_i <- z.
    Q is unbiased (see `qsgd`), so there is no error feedback. The payload is bits / (32 every) of a dense
    step's: 3.1 % with 8 bits every 8 steps, 1.6 % with 4.

    Args:
        every: optimizer steps between two sync rounds; the rate of full communication is kept as long as it
            grows no faster than K^(1/4) W^(-3/4) in the number of steps K.
        bits, norm, bucket, reduce: of the quantiser, as for `qsgd`.
        warmup, momentum, buffers, anchor, grow, longest, fragments, overlap, blend: as for all schedules,
            see docs/periodic.md.

    Example:
        >>> from thinwire.averaging import PQASGD
        >>> str(PQASGD(every=8, bits=8))
        'pqasgd(every=8, bits=8)'

    Differences from the paper: max-norm scaling by default, which at few bits has far less noise; from five
    ranks on the mean is formed in two shots, which quantises a second time (`reduce="gather"` does not);
    small tensors are sent dense.
    """

    name = "pqasgd"
    formula = "(ceil(n * bits / 8) + 4 * ceil(n / bucket)) / every"
    reference = (
        'Jiang and Agrawal, "A linear speedup analysis of distributed deep learning with sparse and '
        'quantized communication", NeurIPS 2018'
    )

    @property
    def inner(self) -> Exchange:
        return QSGD(bits=self.bits, bucket=self.bucket, norm=self.norm, reduce=self.reduce)
