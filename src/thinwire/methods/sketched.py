"""Sketched-SGD: find the heavy coordinates of the mean in a sum of sketches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State, momentum, residual
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Scope, Traits
from thinwire.methods.families.selectors import kept
from thinwire.methods.heavyball import HeavyBall

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
    grow with W. Where the table and the candidates would be no smaller than the vector itself, v is
    averaged whole, and u kept: plain momentum.

    The momentum happens here, so the optimizer must have none; `attach(..., optimizer=...)` checks that.
    Small tensors are averaged with the same momentum (see `heavyball`). For weight decay see `dgc`.

    Args:
        ratio: the part of the entries that is sent, k = max(1, ratio * n).
        rows: of the table, 1, 3, 5 or 7; an entry's estimate is the median over the rows.
        cols: of the table; None is k, at least 64. More cost more and miss less: with 10 k, nearly all of
            k entries that stand out are among 4 k candidates. A larger `ratio` usually pays more.
        k: how many entries are sent, in place of `ratio`.
        candidates: P.
        momentum: a; with 0 nothing is lost: what is not sent stays in v.
        scope: one sketch for the whole "model", or one for each "bucket" or "tensor".

    Reference: Ivkin, Rothchild, Ullah, Braverman, Stoica and Arora, "Communication-efficient distributed
    SGD with sketching", 2019 (the practical version).

    Differences from the paper: sketches are added by all-reduce instead of at a server, so that there is
    no download and no index; the hash is drawn anew at each step, so that no two entries collide for ever;
    blocks of 64 neighbours are hashed together.
    """

    name: ClassVar[str] = "sketched"
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
        for option, value in (("cols", self.cols), ("k", self.k)):
            if value is not None:
                checks.at_least(self.name, option, value, 1)
        checks.at_least(self.name, "candidates", self.candidates, 1)
        checks.momentum(self.name, self.momentum)
        checks.one_of(self.name, "scope", self.scope, ("tensor", "bucket", "model"))

    @property
    def traits(self) -> Traits:
        plain = self.momentum == 0
        return Traits(conserves=plain, optimizer="any" if plain else "no momentum", scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "selection", "scatter", "sketch")

    def init(self, layout: Layout) -> SketchedState:
        size = layout.numel if self.momentum else 0
        return SketchedState(
            torch.zeros(layout.numel, device=layout.device), torch.zeros(size, device=layout.device)
        )

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        if not small:
            return self
        return HeavyBall(self.momentum) if self.momentum else None

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: SketchedState, ch: Channel) -> None:
        u = state.u * self.momentum + x if self.momentum else x
        v = state.v + u
        if not self.worth_it(x.numel()):
            await self._whole(u, v, out, state, ch)
            return
        n, k, cols = x.numel(), self.count(x.numel()), self.columns(x.numel())
        seed = ch.shared_seed()
        table = torch.zeros(self.rows, cols, device=x.device)
        kernels.sketch_insert(v, self.rows, cols, seed, table)
        table = await ch.mean(table, table)
        if not kernels.all_finite(table.view(-1)):  # equal on all ranks, so all leave out the second round
            await ch.commit(False)
            return
        heavy = kernels.sketch_query_topk(table, n, seed, self.fetched(n))
        e = v[heavy.long()]
        e = await ch.mean(e, e)
        largest, values = kernels.topk(e, k)
        sent = heavy[largest.long()]
        if await ch.commit(kernels.all_finite(e)):
            state.v.copy_(v)
            state.v[sent.long()] = 0
            if self.momentum:
                state.u.copy_(u)
                state.u[sent.long()] = 0
        kernels.scatter_mean([sent], [values], out)

    async def _whole(
        self, u: torch.Tensor, v: torch.Tensor, out: torch.Tensor, state: SketchedState, ch: Channel
    ) -> None:
        v = await ch.mean(v, v)
        if await ch.commit(kernels.all_finite(v)):
            state.v.zero_()
            if self.momentum:
                state.u.copy_(u)
        out.copy_(v)

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, k=None, cols=None, momentum=0.0)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        n = layout.numel
        return 4 * (self.rows * self.columns(n) + self.fetched(n) if self.worth_it(n) else n)

    def count(self, n: int) -> int:
        return kept(self.ratio, n) if self.k is None else min(self.k, n)

    def columns(self, n: int) -> int:
        return max(FEWEST_COLS, self.count(n)) if self.cols is None else self.cols

    def fetched(self, n: int) -> int:
        return min(n, self.candidates * self.count(n))

    def worth_it(self, n: int) -> bool:
        return self.rows * self.columns(n) + self.fetched(n) < n
