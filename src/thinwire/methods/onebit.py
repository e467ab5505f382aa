"""1-bit SGD: one bit per entry, two means, error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.core import Channel
from thinwire.methods.families.feedback import DenseMemory, Residual
from thinwire.methods.families.quantised import Parts, Quantised, Reduce, reduce_option


@dataclass(frozen=True)
class OneBit(Quantised):
    """Every entry is sent as the mean of all entries with its sign; the rest stays in the residual.

        u_i = g_i + e_i;  m+ = mean of u_j >= 0;  m- = mean of u_j < 0
        Q(u)_j = m+ if u_j >= 0 else m-;  e_i = u_i - Q(u_i);  out = (1/W) sum_i Q(u_i)

    The two means are the best pair of values that one bit can choose from. The payload is one bit per entry
    and two float32 per tensor. In two shots every stretch has its own means, and its owner keeps what the
    second code loses.

    Differences from the paper: two means for a tensor instead of for each of its columns. Few ranks gather
    instead of using two shots always.
    """

    name = "onebit"
    use_when = """You want one bit per entry under SGD, and positive and negative entries differ in size: they
    get a magnitude each, where `efsign` has one for both."""
    avoid_when = """You train with AdamW: one-bit codes with error feedback end worse than `dense` there. Take
    `qsgd(bits=4)` if nothing may arrive late."""
    formula = "ceil(n / 8) + 8"
    compute = "one pass to code, one to decode each received code, one to update the residual"
    reference = """Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs", 2014"""
    feedback = True
    entries_per_byte = 8
    reduce: Reduce = reduce_option()

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "feedback", "sign")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        with DenseMemory(state.error, x, out) as memory:
            mean = await self.average(memory.u, ch)  # of Q(u), u = g + e
            if await ch.commit(mean.finite):
                mean.subtract_own(memory.commit(), scratch=out)  # e = u - Q(u)
        mean.write(out)  # out = (1/W) sum Q(u)

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """Where v >= 0, packed, and the means m+ and m-."""
        return list(kernels.onebit_pack(v))

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        codes, means = [bits for bits, _ in received], [pair for _, pair in received]
        kernels.onebit_mean(codes, means, out.numel(), out)

    def code_bytes(self, n: int) -> int:
        return -(-n // 8) + 8
