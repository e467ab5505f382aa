"""The exact mean, in full or in half precision on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State
from thinwire.core.layout import Layout
from thinwire.core.traits import Traits


@dataclass(frozen=True)
class Dense(Exchange):
    """The mean of all gradients, uncompressed: one all-reduce.

    out = (1/W) sum_i x_i
    """

    name = "dense"
    formula = "itemsize * n"

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, conserves=True, elementwise=True, single_mean=True)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        await ch.mean(x, out)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        return layout.dense_bytes

    def exact(self) -> Exchange:
        return self


@dataclass(frozen=True)
class _Cast(Exchange):
    """Rounds to a 16-bit type, sums in that type, and widens again: half the bytes."""

    wire_dtype: ClassVar[torch.dtype]

    @property
    def traits(self) -> Traits:
        return Traits(elementwise=True, single_mean=True)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        narrow = x.to(self.wire_dtype, copy=True)
        out.copy_(await ch.mean(narrow, narrow))

    @property
    def rounding(self) -> float:
        return torch.finfo(self.wire_dtype).eps / 2

    def payload_bytes(self, layout: Layout, size: int) -> int:
        return layout.numel * 2


@dataclass(frozen=True)
class FP16(_Cast):
    """Gradients as IEEE half precision: 11 significant bits, largest value 65,504.

    A value beyond that range comes out infinite, as with PyTorch's `fp16_compress_hook`.
    """

    name = "fp16"
    formula = "2 * n"
    wire_dtype = torch.float16


@dataclass(frozen=True)
class BF16(_Cast):
    """Gradients as bfloat16: 8 significant bits, the range of float32."""

    name = "bf16"
    formula = "2 * n"
    wire_dtype = torch.bfloat16


async def exact_mean(x: torch.Tensor, out: torch.Tensor, ch: Channel) -> None:
    """A dense step of a method that remembers things."""
    await ch.mean(x, out)
    await ch.commit(kernels.all_finite(out))
