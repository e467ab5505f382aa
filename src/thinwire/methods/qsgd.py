"""Stochastic quantisation to a few bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.core import Channel, State, checks
from thinwire.methods.families.quantised import Parts, Quantised, Reduce


@dataclass(frozen=True)
class QSGD(Quantised):
    """Every entry is rounded at random to one of a few levels, so that its expectation does not change.

        v: a bucket of consecutive entries;  m = max|v| (or ||v||_2);  s = 2^(b-1) - 1
        a = s |v_j| / m;  xi_j = floor(a) + Bernoulli(a - floor(a));  Q(v)_j = m sign(v_j) xi_j / s
        one bit: Q(v)_j = +m with probability (1 + v_j / m) / 2, else -m
        out = (1/W) sum_i Q(g_i)

    The payload is packed: b bits per entry and one float32 per bucket.

    Args:
        bits: b, the bits per entry with the sign: 1, 2, 4 or 8.
        bucket: the number of entries that share a norm. Smaller buckets are more exact and cost 4/bucket
            bytes per entry.
        norm: "max" has far less noise at few bits; "l2" is the norm of the paper.
        rotate: rotate the tensor at random before it is coded, and the mean back. A few large entries then
            no longer decide how coarse the grid is for all others. The bytes stay the same.

    Example:
        >>> from thinwire.methods import QSGD
        >>> str(QSGD(bits=8))
        'qsgd(bits=8)'

    Differences from the paper: a fixed number of bits per entry instead of Elias coding, which is serial. The
    default norm is the maximum. The rotation is that of Suresh et al., in blocks, twice.
    """

    name = "qsgd"
    use_when = """The link is slow and the accuracy must not change: with 4 or 8 bits it stays close to
    `dense` under SGD and under AdamW. It keeps no residual, so nothing arrives late."""
    avoid_when = """You need far less than an eighth of the bytes. With 1 or 2 bits the noise is large, above
    all with small batches. From five workers on, two shots round a second time."""
    formula = "ceil(n * bits / 8) + 4 * ceil(n / bucket)"
    reference = """Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD", 2017; `rotate`: Suresh, Yu, Kumar and
    McMahan, "Distributed mean estimation with limited communication", 2017"""
    bits: int = 4
    bucket: int = 512
    norm: Literal["max", "l2"] = "max"
    rotate: bool = False
    reduce: Reduce = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(self.name, "bits", self.bits, (1, 2, 4, 8))
        checks.whole(self.name, "bucket", self.bucket, 1)
        checks.one_of(self.name, "norm", self.norm, ("max", "l2"))

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "quantisation", *(("rotation",) if self.rotate else ()))

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        mean = await self.average(x, ch, out)  # of Q(g), as `encode` draws it
        await ch.commit(mean.finite)
        mean.write(out)  # out = (1/W) sum Q(g)

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """The integers sign(v) xi, packed, and the norms m."""
        return list(kernels.quantise(v, self.bits, self.bucket, self.norm, seed))

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        codes, norms = [parts[0] for parts in received], [parts[1] for parts in received]
        kernels.dequantise_mean(codes, norms, self.bits, self.bucket, out.numel(), out)

    def code_bytes(self, n: int) -> int:
        return -(-n * self.bits // 8) + 4 * -(-n // self.bucket)

    @property
    def unit(self) -> int:
        return math.lcm(8, self.bucket)
