"""Signs, one magnitude per tensor, and error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.core import Channel
from thinwire.methods.families.feedback import DenseMemory, Residual
from thinwire.methods.families.quantised import Parts, Quantised, Reduce, reduce_option, scales


@dataclass(frozen=True)
class EFSign(Quantised):
    """Every rank sends the signs of residual + gradient and their mean magnitude, and keeps the rest.

        u_i = g_i + e_i;  Delta_i = (||u_i||_1 / n) sign(u_i);  e_i = u_i - Delta_i
        out = (1/W) sum_i Delta_i

    Delta is a contraction: ||u - Delta||^2 = (1 - delta) ||u||^2 with delta = ||u||_1^2 / (n ||u||_2^2),
    which is 2/pi for a normal distribution. The payload is one bit per entry and one float32 per tensor. Zero
    counts as +. In two shots every stretch has its own magnitude, and its owner keeps what the second code
    loses.

    Differences from the paper: the residual is in units of the gradient, not of gradient times learning rate.
    The codes of many workers are averaged.
    """

    name = "efsign"
    use_when = """You train with SGD over a slow link and want one bit per entry: the residual makes up for
    what the signs lose, so it converges where `signsgd` does not."""
    avoid_when = """You train with AdamW: signs with error feedback end worse than `dense` there. Or a few
    entries of a tensor are far larger than the rest: all get the same magnitude."""
    formula = "ceil(n / 8) + 4"
    compute = "one pass to code, one to decode each received code, one to update the residual"
    reference = """Karimireddy, Rebjock, Stich and Jaggi, "Error feedback fixes SignSGD and other gradient
    compression schemes", 2019"""
    feedback = True
    entries_per_byte = 8
    reduce: Reduce = reduce_option()

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "feedback", "sign")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        with DenseMemory(state.error, x, out) as memory:
            mean = await self.average(memory.u, ch)  # of Delta = (||u||_1 / n) sign(u), u = g + e
            if await ch.commit(mean.finite):
                mean.subtract_own(memory.commit(), scratch=out)  # e = u - Delta
        mean.write(out)  # out = (1/W) sum Delta

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """sign(v), packed, and ||v||_1 / n."""
        bits, magnitude = kernels.sign_pack_mean(v)
        return [bits, torch.tensor([magnitude], dtype=torch.float32, device=v.device)]

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        magnitudes = [scales(magnitude, 1)[0] for _, magnitude in received]
        kernels.sign_mean([bits for bits, _ in received], magnitudes, out.numel(), out)

    def code_bytes(self, n: int) -> int:
        return -(-n // 8) + 4
