"""The exact mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, HostWaits, Layout, Link, State, Traits


@dataclass(frozen=True)
class Dense(Exchange):
    """Averages all gradients uncompressed, in one all-reduce.

        out = (1/W) sum_i g_i

    This is what DDP does without thinwire.
    """

    name = "dense"
    family = "dense"
    use_when = """Communication takes less than a tenth of a step, or you need a baseline to compare other
    methods with."""
    avoid_when = "The link is the bottleneck: every step sends the whole gradient."
    formula = "itemsize * n"
    rounds_per_step = "1 (a mean)"
    compute = "none"
    waits = HostWaits(0)

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, conserves=True, elementwise=True, single_mean=True, scatters=True)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: State, ch: Channel) -> None:
        await ch.mean(x, out)

    async def reduce_scatter(self, pieces: Sequence[torch.Tensor], out: torch.Tensor, ch: Channel) -> None:
        out.copy_(mean_of_all(await ch.scatter([[piece] for piece in pieces])))

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        return layout.dense_bytes

    def exact(self) -> Exchange:
        return self


def mean_of_all(received: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The mean of the first part of every rank, in float32 at least."""
    total = torch.zeros_like(received[0][0], dtype=torch.promote_types(received[0][0].dtype, torch.float32))
    for (part,) in received:
        total += part
    return total.div_(len(received))


async def exact_mean(x: torch.Tensor, out: torch.Tensor, ch: Channel) -> None:
    """A dense step of a method with state."""
    await ch.mean(x, out)
    await ch.commit(kernels.finite_flag(out))
