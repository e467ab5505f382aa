"""Natural compression: rounding to powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.core import Channel, State
from thinwire.kernels.natural import LARGEST_OFFSET, NOT_FINITE
from thinwire.methods.families.quantised import Parts, Quantised, Reduce, reduce_option


@dataclass(frozen=True)
class Natural(Quantised):
    """Every entry is rounded at random to one of the two powers of two around it.

        2^a <= |t| < 2^(a+1):  C(t) = sign(t) 2^(a+1) with probability |t|/2^a - 1, else sign(t) 2^a
        out = (1/W) sum_i C(g_i)

    The expectation of C(t) is t, and its variance is at most t^2/8. The payload is one byte per entry, sign
    and exponent, and one byte for the tensor.

    Differences from the paper: 7 bits of exponent, relative to the largest entry, instead of 8, so that codes
    are whole bytes. Entries 2^126 times smaller than the largest become zero or the smallest power. In
    float16 a mean above 65,504 becomes infinite, because entries above 32,768 may be rounded up to 65,536.
    """

    name = "natural"
    use_when = """Entries of one tensor differ by many orders of magnitude: every entry has the same relative
    error, however small it is, and the result is unbiased."""
    avoid_when = """The entries of a tensor are of similar size: `qsgd(bits=8)` has about the same bytes and
    is more exact. Four workers gather as many bytes as `bf16` sends, which adds no random noise."""
    formula = "n + 1"
    reference = """Horvath, Ho, Horvath, Sahu, Canini and Richtarik, "Natural compression for distributed deep
    learning", 2019"""
    reduce: Reduce = reduce_option()

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("natural",)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        mean = await self.average(x, ch)  # of C(g), as `encode` draws it
        await ch.commit(mean.finite)
        mean.write(out)  # out = (1/W) sum C(g)

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """The signs and exponents of C(v), and the largest exponent."""
        return [kernels.natural_quantise(v, seed)]

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        kernels.natural_mean([parts[0] for parts in received], out.numel(), out)

    def code_bytes(self, n: int) -> int:
        return n + 1

    def finite(self, received: Sequence[Parts]) -> torch.Tensor:
        return torch.stack([parts[0][-1] for parts in received]).max() <= LARGEST_OFFSET

    def spoil(self, parts: Parts, broken: torch.Tensor) -> None:
        parts[0][-1:].masked_fill_(broken, NOT_FINITE)
