"""Periodic quantised averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.averaging.base import PeriodOptions
from thinwire.averaging.localsgd import EveryOption
from thinwire.core import Exchange
from thinwire.methods.qsgd import QSGD


@dataclass(frozen=True)
class _QuantiserOptions(EveryOption):
    bits: int = 4
    norm: Literal["max", "l2"] = "max"
    bucket: int = 512
    reduce: Literal["auto", "gather", "twoshot"] = "auto"


@dataclass(frozen=True)
class PQASGD(PeriodOptions, _QuantiserOptions):
    """Every few steps, the change of each replica since the last sync round is quantised and averaged.

        x_i <- x_i - gamma g_i(x_i) in each step
        z <- z + (1/W) sum_l Q(x_l - z);  x_i <- z after `every` steps, with z the last common model

    Q is unbiased (see `qsgd`), so there is no error feedback. The payload is bits / (32 every) of that of
    `dense`, without the norms of the buckets.

    Args:
        every: the number of optimizer steps between two sync rounds. The rate of full communication is kept
            if it grows no faster than K^(1/4) W^(-3/4) with the number of steps K.
        bits: the bits per entry: 1, 2, 4 or 8.
        norm: the norm of a bucket, "max" or "l2", as for `qsgd`.
        bucket: the number of entries that share a norm.
        reduce: "gather", "twoshot" or "auto", as for `qsgd`.

    Example:
        >>> from thinwire.averaging import PQASGD
        >>> str(PQASGD(every=8, bits=8))
        'pqasgd(every=8, bits=8)'

    Differences from the paper: max-norm scaling by default, which has far less noise at few bits. From five
    ranks on, the mean takes two shots and is quantised twice (not with `reduce="gather"`). Small tensors are
    sent dense.
    """

    name = "pqasgd"
    use_when = """The link is very slow, for example between cities: a few percent of the bytes, and nothing
    between sync rounds. It is the first schedule to try."""
    avoid_when = """`every` is large and the workers see very different data, or entries with few bits share a
    norm over long buckets: both were far worse than full communication in the reproduction. Under AdamW it
    ends slightly worse than `dense`."""
    rounds_per_step = """2 in a sync round (one to compare the ranks, one gather), or 3 with two shots; none
    in between"""
    formula = "(ceil(n * bits / 8) + 4 * ceil(n / bucket)) / every"
    reference = """Jiang and Agrawal, "A linear speedup analysis of distributed deep learning with sparse and
    quantized communication", NeurIPS 2018"""

    @property
    def inner(self) -> Exchange:
        return QSGD(bits=self.bits, bucket=self.bucket, norm=self.norm, reduce=self.reduce)
