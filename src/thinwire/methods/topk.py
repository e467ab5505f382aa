"""Top-k sparsification with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire import checks
from thinwire.channel import Channel
from thinwire.exchange import Exchange, State, Traits, residual
from thinwire.layout import Layout
from thinwire.parts.sparse import kept, largest, scatter_mean


@dataclass
class TopKState(State):
    error: torch.Tensor = residual()


@dataclass(frozen=True)
class TopK(Exchange):
    """Every rank sends its k largest entries; what it does not send it adds to its next gradient.

    u_i = g_i + e_i;  c_i = top_k(u_i);  e_i = u_i - c_i;  out = (1/W) sum_i c_i

    The selection is exact and by magnitude, for each tensor by itself, k = max(1, ratio * n).

    Args:
        ratio: the part of the entries that is sent.
        feedback: keep what is not sent (the default). Without it small gradients are lost for good.

    Example:
        >>> import thinwire
        >>> thinwire.TopK(ratio=0.01)
        TopK(ratio=0.01, feedback=True)

    Reference: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017;
    Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018.

    Differences from the paper: the error is kept in units of the gradient, not of gradient times step
    size, so a change of the learning rate applies to it as well.
    """

    name: ClassVar[str] = "topk"
    ratio: float = 0.01
    feedback: bool = True

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.flag(self.name, "feedback", self.feedback)

    @property
    def traits(self) -> Traits:
        return Traits(conserves=self.feedback)

    def init(self, layout: Layout) -> TopKState:
        size = layout.numel if self.feedback else 0
        return TopKState(torch.zeros(size, dtype=layout.memory_dtype, device=layout.device))

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: TopKState, ch: Channel) -> None:
        u = x + state.error if self.feedback else x
        indices, values = largest(u, kept(self.ratio, x.numel()))
        received = await ch.gather([indices, values])
        finite = all(bool(theirs.isfinite().all()) for _, theirs in received)
        if await ch.settled(finite) and self.feedback:
            u[indices.long()] = 0
            state.error.copy_(u)
        scatter_mean(received, out)

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        return kept(self.ratio, layout.numel) * (4 + layout.memory_dtype.itemsize)
