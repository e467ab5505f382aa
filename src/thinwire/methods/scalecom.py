"""ScaleCom: the ranks take turns to choose the coordinates for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Scope, Traits
from thinwire.methods.families.feedback import Residual, poisoned
from thinwire.methods.families.indices import LONGEST_CHUNK, ChunkCode, ShortestCode
from thinwire.methods.families.sparse import count_of


@dataclass(frozen=True)
class ScaleCom(Exchange):
    """A leader, another one each step, names its k largest entries; all ranks send theirs there.

    p_i = m_i + g_i;  l = t mod W;  I = top_k(p_l), from rank l to all
    out[I] = (1/W) sum_i p_i[I];  m_i = m_i + beta (g_i - p_i on I)

    Since all send the same coordinates, values are added on the way, and the cost does not grow with W:
    the leader's indices in one broadcast, then one mean of k values. m is beta times the residual:
    sum of all that was sent + m / beta = sum of all gradients.

    Args:
        ratio: the part of the entries that is sent, k = max(1, ratio * n).
        beta: below 1 the memory is a low-pass filter: it takes that part of what was not sent. For large
            batches 0.1 to 0.3.
        chunk: instead of the k largest, the largest of every `chunk` entries: the quasi-sort of the paper,
            one pass, in place of `ratio` (the part sent is 1/chunk).
        scope: choose in each "tensor" by itself, in each "bucket", or in the whole "model".

    Differences from the paper: the exact selection is the default, the paper's chunks are an option; all
    tensors of one step have the same ratio (use `route` for rates by layer).
    """

    name = "scalecom"
    formula = "index_bytes(n, k) + 4 * k"
    formula_note = "for the leader of the step; every other rank sends 4 * k bytes"
    reference = (
        'Chen et al., "ScaleCom: scalable sparsified gradient compression for communication-efficient '
        'distributed training", 2020'
    )
    ratio: float = 0.01
    beta: float = 1.0
    chunk: int | None = None
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.fraction(self.name, "beta", self.beta)
        checks.optional(checks.whole, self.name, "chunk", self.chunk, 2, LONGEST_CHUNK)
        checks.scope(self.name, self.scope)

    @property
    def traits(self) -> Traits:
        return Traits(conserves=True, payload="alternating", scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "selection", "feedback", "scatter", "indices", "scalecom")

    def init(self, layout: Layout) -> Residual:
        return Residual.for_layout(layout)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        m, leader, code = state.error, ch.step % ch.size, self.code(x.numel())  # l = t mod W
        coded = torch.empty(code.bytes, dtype=torch.uint8, device=x.device)
        if ch.rank == leader:
            coded = code.encode(self.choose(m, x))  # I = top_k(p_l)
        (coded,) = await ch.broadcast([coded], leader)
        indices = code.decode(coded)
        where = indices.long()
        old = m[where]
        p = poisoned(old + x[where], x)  # p = m + g on I
        p = await ch.mean(p, p)
        if await ch.commit(kernels.all_finite(p)):
            if self.beta == 1:
                kernels.commit_feedback(m, x, indices)  # m = m + g, and 0 on I
            else:
                m.add_(x, alpha=self.beta)  # m = m + beta (g - p on I)
                m[where] = (1 - self.beta) * old
        kernels.scatter_mean([indices], [p], out)  # out = (1/W) sum p on I

    def choose(self, m: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """The coordinates that this rank would choose, ascending."""
        if self.chunk is None:
            return kernels.select_feedback_topk(m, g, count_of(self.ratio, g.numel()))[0]
        return kernels.chunk_argmax_sum(m, g, self.chunk)

    def code(self, n: int) -> ShortestCode | ChunkCode:
        return ShortestCode(n, count_of(self.ratio, n)) if self.chunk is None else ChunkCode(n, self.chunk)

    def residual(self, state: Residual) -> torch.Tensor:
        return state.error / self.beta

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, beta=1.0, chunk=None)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        code = self.code(layout.numel)
        return code.bytes + 4 * code.k
