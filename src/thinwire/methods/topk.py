"""Top-k sparsification with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire import kernels
from thinwire.core import Channel, Traits, checks
from thinwire.errors import ConfigError
from thinwire.methods.families.feedback import Residual, Selector, SparseMemory
from thinwire.methods.families.sparse import SparseByRatio

TOP_K = Selector(kernels.topk, kernels.select_feedback_topk, kernels.feedback_topk)
CHUNK_TOP_K = Selector(kernels.chunk_topk, kernels.select_feedback_chunk_topk, kernels.feedback_chunk_topk)


@dataclass(frozen=True)
class TopK(SparseByRatio):
    """Every rank sends its k largest entries and adds the others to its next gradient.

        u_i = g_i + e_i;  c_i = top_k(u_i);  e_i = beta (u_i - c_i);  out = (1/W) sum_i c_i

    The selection is exact and by magnitude, with k = max(1, ratio * n).

    Args:
        chunk: select k = max(1, ratio * chunk) of every so many consecutive entries: every part of a tensor
            is heard in every step. None selects from the whole tensor.
        decay: beta. Below 1, entries that are not sent are forgotten little by little.

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
    reads_early = True
    chunk: int | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk is not None:
            checks.whole(self.name, "chunk", self.chunk, 1)
        checks.fraction(self.name, "decay", self.decay)
        if self.decay < 1 and not self.feedback:
            raise ConfigError(f"{self.name}: decay is for feedback=True: otherwise nothing is kept")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, conserves=self.feedback and self.decay == 1)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return super().kernel_families if self.chunk is None else (*super().kernel_families, "chunks")

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        n, k = x.numel(), self.count(x.numel(), ch.step)
        with SparseMemory(state.error, x, out) as u:  # u = g + e
            if self.chunk is None:
                c = u.take(TOP_K, k)  # c = top_k(u)
            else:
                c = u.take(CHUNK_TOP_K, self.per_chunk(self.chunk, ch.step))
            mean = await self.average(c, n, k, ch)
            if await ch.commit(mean.finite):
                u.commit(mean.lost, self.decay)  # e = beta (u - c)
        mean.write(await ch.output(out), ch)  # out = (1/W) sum c

    def count(self, n: int, step: int) -> int:
        return super().count(n, step) if self.chunk is None else self.per_chunk(self.chunk, step).total(n)

    def per_chunk(self, chunk: int, step: int) -> kernels.PerChunk:
        return kernels.PerChunk(super().count(chunk, step), chunk)
