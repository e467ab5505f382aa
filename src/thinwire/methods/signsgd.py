"""signSGD with majority vote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from thinwire import kernels
from thinwire.core import Channel, Layout, Link, State, Traits, checks
from thinwire.errors import ConfigError
from thinwire.methods.families import signs
from thinwire.methods.families.quantised import Flag, Parts, Quantised, Reduce
from thinwire.methods.families.votes import vote, vote_on_own


@dataclass(frozen=True)
class SignSGD(Quantised):
    """Every rank votes on the sign of every entry, and the majority decides.

        out = m sign(sum_i sign(g_i));  m by `scale`:
            "rms": (1/W) sum_i ||g_i||_2 / sqrt(n);  "mean": (1/W) sum_i mean|g_i|;  None: 1
        `rotate`: y_i = R g_i;  out = R^T (1/W) sum_i (||y_i||_2^2 / ||y_i||_1) sign(y_i), by blocks

    The payload is one bit per entry, and with two shots one bit back. Votes are counted exactly, so both
    reductions give the same bits. A rank whose tensor is all zeros does not vote on it. If no rank votes, the
    result is zero. Zeros and ties are decided at random: a fixed + would let weights drift.

    Args:
        scale: "rms" makes the result as long as the gradients of the ranks, so their learning rate fits.
            "mean" takes their mean magnitude, which is two to three times smaller if few entries are large.
            None is the paper's scale of 1, and needs a far smaller learning rate.
        rotate: send the signs of a randomly rotated tensor, with one scale per block of 4,096, and average
            them instead of voting: unbiased, up to 1/512 for blocks of few large entries.

    Differences from the paper: the magnitude and the random decisions. Momentum is left to the optimizer.
    """

    name = "signsgd"
    use_when = "Bytes matter more than accuracy, and workers see similar data: one bit per entry, no state."
    avoid_when = """Workers see different data, or you need convergence: without `rotate` it is biased. Take
    `efsign`, which has a residual."""
    formula = "ceil(n / 8) + 4"
    formula_note = "with `rotate` ceil(n / 8) + 4 * ceil(n / 4096), from 4,096 entries on"
    reference = """Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD with majority vote is
    communication efficient and fault tolerant", 2018; `rotate`: Vargaftik et al., "DRIVE", 2021"""
    entries_per_byte = 8
    scale: Literal["rms", "mean"] | None = "rms"
    rotate: bool = False
    reduce: Reduce = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(self.name, "scale", self.scale, ("rms", "mean", None))
        if self.rotate and self.scale != "rms":
            raise ConfigError(f"{self.name}: scale is for votes; with rotate=True it follows from the signs")

    @property
    def traits(self) -> Traits:
        return Traits(scatters=True, unbiased=self.rotate)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "quantisation", "rotation", "sign") if self.rotate else ("sign",)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        if self.rotate:
            await super().run(x, out, state, ch)
            return
        n, two_shot = x.numel(), self.two_shot(x.numel(), ch.size, ch.link)
        bits, own = self.encode(x, ch.private_seed())  # sign(g), and this rank's share of m
        majority, told = await vote(bits, own, ch, two_shot=two_shot)
        await ch.commit(told.isfinite().all())
        m = signs.magnitude_of(told, self.scale)
        kernels.sign_unpack(majority, m, n, out)  # out = m sign(sum sign(g))

    async def reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, ch: Channel) -> Flag:
        if self.rotate:
            return await super().reduce_scatter(pieces, out, ch)
        ballots = [self.encode(v, ch.private_seed()) for v in pieces]
        majority, told = await vote_on_own(self.all_or_none(ballots), ch)
        kernels.sign_unpack(majority, signs.magnitude_of(told, self.scale), out.numel(), out)
        return told.isfinite().all()

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        return signs.scaled_signs(v) if self.rotate else signs.ballot(v, seed, self.scale)

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        (signs.scaled_signs_mean if self.rotate else signs.ballots_mean)(received, out)

    def code_bytes(self, n: int) -> int:
        return signs.scaled_signs_bytes(n) if self.rotate else signs.ballot_bytes(n)

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        if self.rotate or not self.two_shot(layout.numel, size, link):
            return super().payload_bytes(layout, size, link)
        votes = -(-layout.numel // 8)
        return votes + 4 * size + -(-votes // size)
