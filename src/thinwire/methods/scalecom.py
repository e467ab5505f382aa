"""ScaleCom: the ranks take turns to choose the coordinates for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, Layout, Link, Traits, checks
from thinwire.core.traits import Scope
from thinwire.methods.families.feedback import Entries, Residual, at, poisoned
from thinwire.methods.families.indices import LONGEST_CHUNK, ChunkCode, ShortestCode
from thinwire.methods.families.sparse import SparseMean, count_of


@dataclass(frozen=True)
class ScaleCom(Exchange):
    """One rank, another in each step, names its k largest entries; all ranks send these entries.

        p_i = m_i + g_i;  l = t mod W;  I = top_k(p_l), from rank l to all
        out[I] = (1/W) sum_i p_i[I];  m_i = m_i + beta (g_i - p_i on I)

    All ranks send the same coordinates, so values are added on the way, and the cost does not grow with W.
    m is beta times the residual: all that was sent, plus m / beta, is the sum of all gradients.

    Args:
        ratio: the share of the entries that is sent: k = max(1, ratio * n).
        beta: the share of what was not sent that is kept; below 1 a low-pass filter for large batches (see
            `thinwire.predict.layer_rates.beta_for`).
        chunk: send the largest of every `chunk` entries instead of the k largest: the paper's quasi-sort.
        scope: choose in each "tensor", in each "bucket", or in the whole "model".

    Differences from the paper: exact selection is the default. All tensors have the same ratio;
    `thinwire.predict.layer_rates.scalecom_by_layer` gives each layer the paper's rate.
    """

    name = "scalecom"
    family = "shared"
    use_when = """There are many workers and the link is very slow: one index list serves all, and the bytes
    hardly grow with the number of workers."""
    avoid_when = """You train with AdamW: it ends worse than `dense`. Or for some hundred steps only: it is
    points behind then. Or batches are small, since one worker's noise chooses for all, or latencies long."""
    formula = "index_bytes(n, k) + 4 * k"
    formula_note = "for the leader of the step; every other rank sends 4 * k bytes"
    rounds_per_step = "2 (a broadcast of the indices, then a mean)"
    compute = "the leader selects in one pass; every rank updates its residual in one"
    reference = """Chen et al., "ScaleCom: scalable sparsified gradient compression for
    communication-efficient distributed training", 2020"""
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
            coded = code.encode(code.choose(m, x))  # I = top_k(p_l)
        indices = code.decode((await ch.broadcast([coded], leader))[0])
        old = at(m, indices)
        p = poisoned(old + at(x, indices), x, indices)  # p = m + g on I
        mean = SparseMean([Entries(indices, await ch.mean(p, p))], n=x.numel())
        if await ch.commit(mean.finite):
            if self.beta == 1:
                kernels.commit_feedback(m, x, indices)  # m = m + g, and 0 on I
            else:
                m.add_(x, alpha=self.beta)  # m = m + beta (g - p on I)
                m[indices.long()] = (1 - self.beta) * old
        mean.write(out, ch)  # out = (1/W) sum p on I

    def code(self, n: int) -> ShortestCode | ChunkCode:
        return ShortestCode(n, count_of(self.ratio, n)) if self.chunk is None else ChunkCode(n, self.chunk)

    def residual(self, state: Residual) -> torch.Tensor:
        return state.error / self.beta

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, beta=1.0, chunk=None)

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        code = self.code(layout.numel)
        return code.bytes + 4 * code.k
