"""Natural compression: rounding to powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.kernels.natural import NOT_FINITE
from thinwire.methods.families.quantised import Parts, Quantised


@dataclass(frozen=True)
class Natural(Quantised):
    """Every entry is rounded at random to one of the two powers of two around it.

    2^a <= |t| < 2^(a+1):  C(t) = sign(t) 2^(a+1) with probability |t|/2^a - 1, else sign(t) 2^a

    Its expectation is t and its variance at most t^2/8. One byte an entry, sign and exponent, and one for
    a tensor.

    Args:
        reduce: as for all methods that code every entry.

    Reference: Horvath, Ho, Horvath, Sahu, Canini and Richtarik, "Natural compression for distributed deep
    learning", 2019.

    Differences from the paper: 7 bits of exponent, relative to the largest of the tensor, instead of 8:
    whole bytes; what is 2^126 times smaller than the largest entry becomes zero or the smallest power.
    In float16 a mean above 65,504 comes out infinite: entries above 32,768 may be rounded up to that.
    """

    name: ClassVar[str] = "natural"

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("natural",)

    def encode(self, v: torch.Tensor, seed: int) -> list[torch.Tensor]:
        return [kernels.natural_quantise(v, seed)]

    def decode_mean(self, received: Sequence[Parts], out: torch.Tensor) -> None:
        kernels.natural_mean([parts[0] for parts in received], out.numel(), out)

    def code_bytes(self, n: int) -> int:
        return n + 1

    def finite(self, received: Sequence[Parts]) -> bool:
        return all(int(parts[0][-1]) != NOT_FINITE for parts in received)
