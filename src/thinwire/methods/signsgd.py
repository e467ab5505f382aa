"""signSGD with majority vote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import State
from thinwire.core.layout import Layout
from thinwire.core.traits import Traits
from thinwire.methods.families.quantised import Parts, Quantised, Reduce
from thinwire.methods.families.votes import vote


@dataclass(frozen=True)
class SignSGD(Quantised):
    """Every rank votes for the sign of every entry; the majority decides.

    out = m sign(sum_i sign(g_i)),  m = (1/W) sum_i ||g_i||_2 / sqrt(d), or (1/W) sum_i mean|g_i|, or 1

    One bit per entry on the wire, there and, with two shots, back: votes are counted exactly, so that
    both ways of reducing give the same bits. Biased, and nothing is remembered: it need not converge
    where the ranks' gradients differ much. `efsign` does.

    Whoever has a tensor of zeros does not vote on it (with no vote at all the result is zero). Single
    zeros have no sign and a vote may end in a tie: both are decided by lot, since always + would let
    weights drift that get no gradient.

    Args:
        scale: "rms" (the default) makes the result as long as the ranks' gradients are, so that their
            learning rate does; "mean" takes their mean magnitude, two to three times less where few
            entries are large; None is the paper's, and wants a far smaller learning rate.
        reduce: as for all methods that code every entry.

    Differences from the paper: the magnitude; the lot; momentum is the optimizer's, after the vote.
    """

    name = "signsgd"
    formula = "ceil(n / 8) + 4"
    reference = (
        'Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD with majority vote is communication '
        'efficient and fault tolerant", 2018'
    )
    entries_per_byte = 8
    scale: Literal["rms", "mean"] | None = "rms"
    reduce: Reduce = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(self.name, "scale", self.scale, ("rms", "mean", None))

    @property
    def traits(self) -> Traits:
        return Traits()

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("sign",)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        n = x.numel()
        signs, own = self.encode(x, ch.private_seed())  # sign(g), and this rank's part of m
        majority, told = await vote(signs, own, ch, two_shot=self.two_shot(n, ch.size))
        await ch.commit(all(map(math.isfinite, told)))
        m = max(told) if self.scale is None else sum(told) / len(told)
        kernels.sign_unpack(majority, m, n, out)  # out = m sign(sum sign(g))

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """The votes, and a magnitude that also tells a tensor of zeros (0) and one not finite."""
        if seed % 2:
            bits, magnitude = kernels.sign_pack_mean(v)
        else:  # -v >= 0 where v <= 0: now the zeros are among the others
            bits, magnitude = kernels.sign_pack_mean(-v)
            bits = ~bits
        if 0 < magnitude < torch.inf and self.scale != "mean":
            magnitude = 1.0 if self.scale is None else _rms(v, magnitude)
        return [bits, torch.tensor([magnitude], dtype=torch.float32, device=v.device)]

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        magnitudes = [float(magnitude) for _, magnitude in received]
        kernels.sign_mean([bits for bits, _ in received], magnitudes, out.numel(), out)

    def code_bytes(self, n: int) -> int:
        return -(-n // 8) + 4

    def payload_bytes(self, layout: Layout, size: int) -> int:
        votes = -(-layout.numel // 8)
        if not self.two_shot(layout.numel, size):
            return votes + 4
        return votes + 4 * size + -(-votes // size)


def _rms(v: torch.Tensor, mean: float) -> float:
    """The root of the mean square; `mean`, of the magnitudes, serves where squares leave float32's range."""
    norm = cast(torch.Tensor, torch.linalg.vector_norm(v, dtype=torch.float32))
    root = float(norm) / math.sqrt(v.numel())
    return root if 0 < root < torch.inf else mean
