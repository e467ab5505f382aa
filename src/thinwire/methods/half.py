"""The mean in half precision on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.core import Channel, Exchange, HostWaits, Layout, Link, State, Traits
from thinwire.methods.dense import mean_of_all


@dataclass(frozen=True)
class _Cast(Exchange):
    """Rounds to a 16-bit type, adds in that type, and widens the sum: half the bytes."""

    family = "dense"
    formula = "2 * n"
    rounds_per_step = "1 (a mean)"
    compute = "two conversions per entry"
    waits = HostWaits(0)
    wire_dtype: ClassVar[torch.dtype]

    @property
    def traits(self) -> Traits:
        return Traits(elementwise=True, single_mean=True, scatters=True)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        narrow = x.to(self.wire_dtype, copy=True)
        out.copy_(await ch.mean(narrow, narrow))

    async def reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, ch: Channel) -> None:
        out.copy_(mean_of_all(await ch.scatter([[piece.to(self.wire_dtype)] for piece in pieces])))

    @property
    def rounding(self) -> float:
        return torch.finfo(self.wire_dtype).eps / 2

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        return layout.numel * 2


@dataclass(frozen=True)
class FP16(_Cast):
    """Averages gradients in IEEE half precision: 11 significant bits, largest value 65,504.

        out = (1/W) sum_i half(g_i)

    The sum is rounded to half precision as well. Larger values become infinite, as with PyTorch's
    `fp16_compress_hook`.
    """

    name = "fp16"
    use_when = """You want half the bytes for almost no work, and the loss is scaled by a GradScaler or the
    gradients are moderate. The result is close to `dense` under any optimizer."""
    avoid_when = """Gradients or their sums may exceed 65,504, or are so small that half precision rounds them
    to zero: take `bf16`. Half the bytes may not be enough on a very slow link."""
    wire_dtype = torch.float16


@dataclass(frozen=True)
class BF16(_Cast):
    """Averages gradients in bfloat16: 8 significant bits, the range of float32.

        out = (1/W) sum_i bfloat16(g_i)

    The sum is rounded to bfloat16 as well.
    """

    name = "bf16"
    use_when = """You want half the bytes for almost no work, and no overflow. The result is close to `dense`
    under SGD and AdamW."""
    avoid_when = """You need more than half of the bytes gone, or there are very many workers: sums are
    rounded to 8 significant bits on the way."""
    wire_dtype = torch.bfloat16
