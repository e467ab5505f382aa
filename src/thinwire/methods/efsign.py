"""Signs, one magnitude per tensor or bucket, and error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from thinwire import kernels
from thinwire.core import Channel, Traits, checks
from thinwire.core.traits import Scope
from thinwire.methods.families.feedback import DenseMemory, Residual
from thinwire.methods.families.quantised import Parts, Quantised, Reduce, padded, reduce_option
from thinwire.methods.families.sign_feedback import SignFeedback
from thinwire.methods.families.signs import signs_mean, signs_of


@dataclass(frozen=True)
class EFSign(Quantised):
    """Every rank sends the signs of residual + gradient and their mean magnitude, and keeps the rest.

        u_i = g_i + e_i;  Delta_i = (||u_i||_1 / n) sign(u_i);  e_i = u_i - Delta_i
        out = (1/W) sum_i Delta_i

    Delta is a contraction: ||u - Delta||^2 = (1 - delta) ||u||^2 with delta = ||u||_1^2 / (n ||u||_2^2),
    which is 2/pi for a normal distribution. The payload is one bit per entry and one float32 per tensor or
    bucket. Zero counts as +. In two shots every stretch has magnitudes of its own, and its owner keeps what
    the second code loses.

    Args:
        bucket: how many consecutive entries share a magnitude, a multiple of 4,096. None is the whole tensor.
        bits: with 2 or more, what the signs lose is coded in the same way, and so on: bits per entry.
        scope: code each "tensor" by itself, or those of a "bucket" or the "model" as one, with fewer calls.

    Differences from the paper: the residual is in units of the gradient, not of gradient times learning rate.
    The codes of many workers are averaged. More than one bit.
    """

    name = "efsign"
    use_when = """You train with SGD over a slow link and want one bit per entry: the residual makes up for
    what the signs lose, so it converges where `signsgd` does not."""
    avoid_when = """You train with AdamW: take `adam(exchange=efsign(bucket=4096))`. Or a few entries of a
    tensor are far larger than the rest: all get the same magnitude."""
    formula = "bits * (ceil(n / 8) + 4)"
    formula_note = "and 4 bytes for each further bucket and bit"
    compute = "one pass to code, one to decode each received code, one to update the residual"
    reference = 'Karimireddy, Rebjock, Stich and Jaggi, "Error feedback fixes SignSGD", 2019'
    rounds_per_step = "1 (a gather), or 2 with two shots, from three ranks on"
    feedback = True
    two_shots_from = 3  # the second rounding goes into the residual
    bucket: int | None = field(default=None, metadata={"main": False})
    bits: int = field(default=1, metadata={"main": False})
    scope: Scope = field(default="tensor", metadata={"main": False})
    reduce: Reduce = reduce_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(self.name, "bits", self.bits, 1, 8)
        checks.scope(self.name, self.scope)
        checks.optional(checks.multiple, self.name, "bucket", self.bucket, kernels.SIGN_TILE)

    @property
    def traits(self) -> Traits:
        return replace(super().traits, scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "feedback", "sign", "sign_feedback")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        if self.bits == 1 and self.bucket is not None and x.device.type == "cpu":
            await SignFeedback(self, self.bucket, state.error, x, out).run(ch)  # the same in fewer passes
            return
        with DenseMemory(state.error, x, out) as memory:
            mean = await self.average(memory.u, ch)  # of Delta = (||u||_1 / n) sign(u), u = g + e
            if await ch.commit(mean.finite):
                mean.subtract_own(memory.commit(), scratch=out)  # e = u - Delta
        mean.write(out)  # out = (1/W) sum Delta

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """For each bit: the signs of what is left of v, packed, and its mean magnitudes."""
        return signs_of(v, self.bucket, self.bits)

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        signs_mean(received, self.bucket, out)

    def encode_padded(self, v: torch.Tensor, n: int, seed: int, rotation: int) -> list[torch.Tensor]:
        del rotation  # it has none
        sizes = [-(-n // 8), self._magnitudes(n)] * self.bits
        return [padded(part, size) for part, size in zip(self.encode(v, seed), sizes, strict=True)]

    def code_bytes(self, n: int) -> int:
        return self.bits * (-(-n // 8) + 4 * self._magnitudes(n))

    def _magnitudes(self, n: int) -> int:
        return 1 if self.bucket is None else -(-n // self.bucket)
