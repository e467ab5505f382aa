"""Top-k sparsification with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.core import Channel
from thinwire.methods.families.feedback import Residual, Selector, SparseMemory
from thinwire.methods.families.sparse import SparseByRatio

TOP_K = Selector(kernels.topk, kernels.select_feedback_topk, kernels.feedback_topk)


@dataclass(frozen=True)
class TopK(SparseByRatio):
    """Every rank sends its k largest entries and adds the others to its next gradient.

        u_i = g_i + e_i;  c_i = top_k(u_i);  e_i = u_i - c_i;  out = (1/W) sum_i c_i

    The selection is exact and by magnitude, with k = max(1, ratio * n).

    Example:
        >>> from thinwire.methods import TopK
        >>> str(TopK(ratio=0.001, scope="model"))
        "topk(ratio=0.001, scope='model')"

    Differences from the paper: the residual is in units of the gradient, not of gradient times learning
    rate, so a change of the learning rate applies to it as well.
    """

    name = "topk"
    use_when = """The link is very slow, there are few workers, and you train with SGD for many steps: it
    sends a small part of the bytes, in one round."""
    avoid_when = """You train with AdamW: entries that arrive late and bundled end worse than `dense` today.
    Short runs also lose accuracy. With very many workers take a method that averages instead of gathering."""
    formula = "index_bytes(n, k) + 4 * k"
    reference = """Aji and Heafield, "Sparse communication for distributed gradient descent", 2017; Stich,
    Cordonnier and Jaggi, "Sparsified SGD with memory", 2018; the split reduction follows the idea of Li and
    Hoefler, "Near-optimal sparse allreduce", 2022"""
    proven_codes = ("qsgd", "natural", "efsign", "onebit")
    proven_codes_in_a_gather = ("terngrad",)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        n, k = x.numel(), self.count(x.numel(), ch.step)
        with SparseMemory(state.error, x, out) as u:  # u = g + e
            c = u.take(TOP_K, k)  # c = top_k(u)
            mean = await self.average(c, n, k, ch)
            if await ch.commit(mean.finite):
                u.commit(mean.lost)  # e = u - c
        mean.write(out)  # out = (1/W) sum c
