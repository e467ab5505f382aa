"""Stochastic quantisation to a few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from thinwire import checks
from thinwire.channel import Channel
from thinwire.exchange import Exchange, State, Traits
from thinwire.layout import Layout
from thinwire.parts import quantise


@dataclass(frozen=True)
class QSGD(Exchange):
    """Every entry is rounded at random to one of a few levels, so that its expectation is itself.

    For a bucket v of consecutive entries with norm m = max|v| (or ||v||_2) and s = 2^(b-1) - 1:
    Q(v)_j = m sign(v_j) xi_j / s,  a = s|v_j|/m,  xi_j = floor(a) + Bernoulli(a - floor(a))
    With one bit: Q(v)_j = +m with probability (1 + v_j/m)/2, else -m.

    Really packed: b bits an entry and one float32 a bucket, over an all-gather.

    Args:
        bits: 1, 2, 4 or 8 bits an entry, the sign included.
        bucket: entries that share a norm; smaller is more exact and costs 4/bucket bytes an entry.
        norm: "max" (the default; far less noise at few bits) or "l2" (the paper's).

    Reference: Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD", 2017.

    Differences from the paper: a fixed number of bits an entry instead of Elias coding, which is serial;
    the maximum as the default norm.
    """

    name: ClassVar[str] = "qsgd"
    bits: int = 4
    bucket: int = 512
    norm: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        checks.one_of(self.name, "bits", self.bits, (1, 2, 4, 8))
        checks.at_least(self.name, "bucket", self.bucket, 1)
        checks.one_of(self.name, "norm", self.norm, ("max", "l2"))

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        packed, scales = quantise.encode(x, self.bits, self.bucket, self.norm, ch.private_rng())
        received = await ch.gather([packed, scales])
        finite = all(bool(theirs.isfinite().all()) for _, theirs in received)
        await ch.settled(finite)
        quantise.decode_mean(received, self.bits, self.bucket, out)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        return quantise.packed_bytes(layout.numel, self.bits) + 4 * -(-layout.numel // self.bucket)
