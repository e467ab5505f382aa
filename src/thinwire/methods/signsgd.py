"""signSGD with majority vote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.core import Channel, Layout, State, Traits, checks
from thinwire.methods.families.quantised import Parts, Quantised, Reduce
from thinwire.methods.families.votes import rms, vote, vote_on_own


@dataclass(frozen=True)
class SignSGD(Quantised):
    """Every rank votes on the sign of every entry, and the majority decides.

        out = m sign(sum_i sign(g_i));  m by `scale`:
            "rms": (1/W) sum_i ||g_i||_2 / sqrt(n);  "mean": (1/W) sum_i mean|g_i|;  None: 1

    The payload is one bit per entry, and with two shots one bit back. Votes are counted exactly, so both
    reductions give the same bits.

    A rank whose tensor is all zeros does not vote on it. If no rank votes, the result is zero. Zeros and ties
    are decided at random: a fixed + would let weights without a gradient drift.

    Args:
        scale: "rms" makes the result as long as the gradients of the ranks, so their learning rate fits.
            "mean" takes their mean magnitude, which is two to three times smaller if few entries are large.
            None is the paper's scale of 1, and needs a far smaller learning rate.

    Differences from the paper: the magnitude, and the random decisions. Momentum is left to the optimizer,
    after the vote.
    """

    name = "signsgd"
    use_when = """Bytes matter more than accuracy, and the workers see similar data: one bit per entry and no
    state."""
    avoid_when = """The workers see different data, or you need convergence: it is biased, and what the signs
    lose is lost. Take `efsign`, which has a residual."""
    formula = "ceil(n / 8) + 4"
    reference = """Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD with majority vote is
    communication efficient and fault tolerant", 2018"""
    entries_per_byte = 8
    scale: Literal["rms", "mean"] | None = "rms"
    reduce: Reduce = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(self.name, "scale", self.scale, ("rms", "mean", None))

    @property
    def traits(self) -> Traits:
        return Traits(scatters=True)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("sign",)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        n = x.numel()
        signs, own = self.encode(x, ch.private_seed())  # sign(g), and this rank's share of m
        majority, told = await vote(signs, own, ch, two_shot=self.two_shot(n, ch.size))
        await ch.commit(all(map(math.isfinite, told)))
        kernels.sign_unpack(majority, self._magnitude(told), n, out)  # out = m sign(sum sign(g))

    async def reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, ch: Channel) -> None:
        majority, told = await vote_on_own([self.encode(v, ch.private_seed()) for v in pieces], ch)
        kernels.sign_unpack(majority, self._magnitude(told), out.numel(), out)

    def _magnitude(self, told: Sequence[float]) -> float:
        mean = sum(told) / len(told)
        return max(told) if self.scale is None and math.isfinite(mean) else mean

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """The votes and the magnitude: 0 for a tensor of zeros, non-finite for a non-finite tensor."""
        if seed % 2:
            bits, magnitude = kernels.sign_pack_mean(v)
        else:  # -v >= 0 where v <= 0: zeros now vote for -
            bits, magnitude = kernels.sign_pack_mean(-v)
            bits = ~bits
        if 0 < magnitude < torch.inf and self.scale != "mean":
            magnitude = 1.0 if self.scale is None else rms(v, magnitude)
        return [bits, torch.tensor([magnitude], dtype=torch.float32, device=v.device)]

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        magnitudes = [float(magnitude) for _, magnitude in received]
        kernels.sign_mean([bits for bits, _ in received], magnitudes, out.numel(), out)

    def code_bytes(self, n: int) -> int:
        return -(-n // 8) + 4

    def payload_bytes(self, layout: Layout, size: int) -> int:
        votes = -(-layout.numel // 8)
        two_shot = self.two_shot(layout.numel, size)
        return votes + 4 * size + -(-votes // size) if two_shot else votes + 4
