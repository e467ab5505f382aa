"""Sketched-SGD: find the heavy coordinates of the mean in a sum of sketches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State, momentum, residual
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Scope, Traits
from thinwire.methods.families.sparse import count_of
from thinwire.methods.heavyball import HeavyBall, corrected, masked

# Entries are hashed in blocks of 64 to neighbouring columns: with fewer, a block collides with itself.
FEWEST_COLS = 64


@dataclass
class SketchedState(State):
    """`u` is empty where there is no momentum."""

    v: torch.Tensor = residual()
    u: torch.Tensor = momentum()


@dataclass(frozen=True)
class Sketched(Exchange):
    """Adds up small sketches of what has piled up, reads the largest entries off, fetches them exactly.

    u_i = a u_i + g_i;  v_i = v_i + u_i                                momentum correction
    S = (1/W) sum_i sketch(v_i)                                        rows x cols numbers, one mean
    I = the P k largest of unsketch(S);  e = (1/W) sum_i v_i[I]        equal on all ranks, one mean
    J = the k largest of e;  out[J] = e[J];  u_i[J] = v_i[J] = 0       momentum factor masking

    Sketches are linear, so their mean is the sketch of the mean: no index travels, and the cost does not
    grow with W. Where the table and the candidates would be no smaller than v itself, v is averaged whole,
    and u kept: plain momentum. For the optimizer, small tensors and weight decay see `dgc`.

    Args:
        ratio: the part of the entries that is sent, k = max(1, ratio * n).
        rows: of the table, 1, 3, 5 or 7; an entry's estimate is the median over the rows.
        cols: of the table; None is k, at least 64. With 10 k, nearly all of k entries that stand out are
            among 4 k candidates; but a larger `ratio` usually pays more.
        k: how many entries are sent, in place of `ratio`.
        candidates: P.
        momentum: a; with 0 nothing is lost: what is not sent stays in v.
        scope: one sketch for the whole "model", or one for each "bucket" or "tensor".

    Differences from the paper: sketches are added by all-reduce instead of at a server, so that there is
    no download and no index; the hash is drawn anew at each step, so that no two entries collide for ever;
    blocks of 64 neighbours are hashed together.
    """

    name = "sketched"
    formula = "4 * (hashes * columns + fetched)"
    formula_note = "hashes and columns of the table, and P * k fetched entries"
    reference = (
        'Ivkin, Rothchild, Ullah, Braverman, Stoica and Arora, "Communication-efficient distributed SGD with '
        'sketching", 2019 (the practical version)'
    )
    ratio: float = 0.02
    rows: int = 5
    cols: int | None = None
    k: int | None = None
    candidates: int = 4
    momentum: float = 0.9
    scope: Scope = "model"

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.one_of(self.name, "rows", self.rows, (1, 3, 5, 7))
        checks.optional(checks.whole, self.name, "cols", self.cols, 1)
        checks.optional(checks.whole, self.name, "k", self.k, 1)
        checks.whole(self.name, "candidates", self.candidates, 1)
        checks.momentum(self.name, self.momentum)
        checks.scope(self.name, self.scope)

    @property
    def traits(self) -> Traits:
        plain = self.momentum == 0
        return Traits(conserves=plain, optimizer="any" if plain else "no momentum", scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "selection", "scatter", "sketch")

    def init(self, layout: Layout) -> SketchedState:
        sizes = layout.numel, layout.numel if self.momentum else 0
        return SketchedState(*(torch.zeros(size, device=layout.device) for size in sizes))

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        fallback = HeavyBall(self.momentum) if self.momentum else None
        return fallback if small else self

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: SketchedState, ch: Channel) -> None:
        n, (k, cols, fetched), seed = x.numel(), self.sizes(x.numel()), ch.shared_seed()
        u, _ = corrected(x, state.u, self.momentum)  # u = a u + g
        v = state.v + u  # v = v + u
        if self.rows * cols + fetched >= n:  # a sketch would be no smaller than v
            v = await ch.mean(v, v)
            if await ch.commit(kernels.all_finite(v)):
                state.v.zero_()
                masked(state.u, u, v[:0])
            out.copy_(v)
            return
        table = torch.zeros(self.rows, cols, device=x.device)
        kernels.sketch_insert(v, self.rows, cols, seed, table)
        S = await ch.mean(table, table)  # S = (1/W) sum sketch(v)
        if not kernels.all_finite(S.view(-1)):  # equal on all ranks, so all leave out the second round
            await ch.commit(False)
            return
        heavy = kernels.sketch_query_topk(S, n, seed, fetched)  # I = the P k largest of unsketch(S)
        e = v[heavy.long()]
        e = await ch.mean(e, e)  # e = (1/W) sum v[I]
        largest, values = kernels.topk(e, k)
        J = heavy[largest.long()]  # J = the k largest of e
        if await ch.commit(kernels.all_finite(e)):
            masked(state.v, v, J)  # v[J] = 0
            masked(state.u, u, J)  # u[J] = 0
        kernels.scatter_mean([J], [values], out)  # out[J] = e[J]

    def sizes(self, n: int) -> tuple[int, int, int]:
        """k, the columns of the table, and how many entries are fetched (P k)."""
        k = count_of(self.ratio, n) if self.k is None else min(self.k, n)
        return k, max(FEWEST_COLS, k) if self.cols is None else self.cols, min(n, self.candidates * k)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        _, cols, fetched = self.sizes(layout.numel)
        return 4 * min(layout.numel, self.rows * cols + fetched)

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, k=None, cols=None, momentum=0.0)
