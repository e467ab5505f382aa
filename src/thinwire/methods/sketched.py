"""Sketched-SGD: find the heavy coordinates of the mean in a sum of sketches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, Slot
from thinwire.methods.families.momentum import Accumulated, corrected, masked
from thinwire.methods.families.sketch import SketchOptions
from thinwire.methods.heavyball import HeavyBall


@dataclass(frozen=True)
class Sketched(SketchOptions):
    """Finds the largest entries of the mean in a sum of small sketches, then averages them exactly.

        u_i = a u_i + g_i;  v_i = v_i + u_i                            momentum correction
        S = (1/W) sum_i sketch(v_i)                                    one mean of rows x cols numbers
        I = the P k largest of unsketch(S);  e = (1/W) sum_i v_i[I]    one mean; the same I on all ranks
        J = the k largest of e;  out[J] = e[J];  u_i[J] = v_i[J] = 0   momentum factor masking

    Sketches are linear: the mean of sketches is the sketch of the mean. So no index is sent, and the cost
    does not grow with W. If the table and the candidates would be no smaller than v, v itself is averaged,
    and u is kept: plain momentum. For the optimizer, small tensors and weight decay see `dgc`.

    Args:
        ratio: the share of the entries that is sent: k = max(1, ratio * n).
        rows: the rows of the table: 1, 3, 5 or 7. The estimate of an entry is the median over the rows.
        cols: the columns of the table. None is k / 4 (k without candidates), and at least 64: on real
            gradients more entries recover more than more columns do, at equal bytes.
        k: the number of entries that are sent, instead of `ratio`.
        candidates: P. P k entries are fetched exactly, and the k largest of them are sent. With 0 there is
            no second round: the k largest estimates of the sketch itself are taken.
        momentum: a. With 0 nothing is lost: what is not sent stays in v.
        scope: one sketch for the whole "model", or one for each "bucket" or "tensor".
        wire: "fp32", or "bf16" or "fp16" for half the bytes of tables and entries.

    Differences from the paper: sketches are added by all-reduce instead of at a server, so there is no
    download and no index. The hash changes in every step, so no two entries collide forever. Blocks of 64
    neighbours are hashed together.
    """

    name = "sketched"
    family = "shared"
    use_when = """There are very many workers, the model is large, and you train with momentum SGD: the bytes
    hardly grow with the number of workers, and no index is sent."""
    avoid_when = """There are few workers: for the same k, `dgc` sends far fewer bytes. Or the run is short,
    since what is not sent at once comes some hundred steps late; or you train with AdamW, whose momentum it
    replaces. A table that is too small finds few of the largest entries."""
    formula = "width * (hashes * columns + fetched)"
    formula_note = """for the rows (hashes) and columns of the table, and P * k fetched entries; width is 4,
    or 2 for a wire of 16 bits"""
    rounds_per_step = "2 (the table, then the fetched entries), or 1 with candidates=0"
    compute = "one pass per row of the table to insert, and one to estimate every entry"
    reference = """Ivkin, Rothchild, Ullah, Braverman, Stoica and Arora, "Communication-efficient distributed
    SGD with sketching", 2019 (the practical version)"""

    def assign(self, slot: Slot, *, small: bool) -> Exchange | None:
        fallback = HeavyBall(self.momentum) if self.momentum else None
        return fallback if small else self

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Accumulated, ch: Channel) -> None:
        n, (k, cols, fetched), seed = x.numel(), self.sizes(x.numel()), ch.shared_seed()
        u, _ = corrected(x, state.u, self.momentum)  # u = a u + g
        v = state.v + u  # v = v + u
        if self.rows * cols + fetched >= n:  # a sketch would be no smaller than v
            v = await ch.mean(v, v)
            if await ch.commit(kernels.finite_flag(v)):
                state.v.zero_()
                masked(state.u, u, v[:0])
            out.copy_(v)
            return
        table = torch.zeros(self.rows, cols, device=x.device)
        kernels.sketch_insert(v, self.rows, cols, seed, table)
        S = await self.averaged(table, ch)  # S = (1/W) sum sketch(v)
        finite = kernels.finite_flag(S.view(-1))
        if finite is False:  # the same on all ranks: all skip the second round
            await ch.commit(False)
            return
        if fetched:
            heavy = kernels.sketch_query_topk(S, n, seed, fetched)  # I = the P k largest of unsketch(S)
            e = await self.averaged(v[heavy.long()], ch)  # e = (1/W) sum v[I]
        else:
            heavy, e = torch.arange(n, dtype=torch.int32, device=x.device), torch.empty(n, device=x.device)
            kernels.sketch_query(S, n, seed, e)  # e = unsketch(S), in one round
        largest, values = kernels.topk(e, k)
        J = heavy[largest.long()]  # J = the k largest of e
        if await ch.commit(kernels.all_flags([finite, kernels.finite_flag(values)])):
            masked(state.v, v, J)  # v[J] = 0
            masked(state.u, u, J)  # u[J] = 0
        kernels.scatter_mean([J], [values], out)  # out[J] = e[J]

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, k=None, cols=None, candidates=4, momentum=0.0, wire="fp32")
