"""Top-k sparsification with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.methods.families.selectors import Largest, Selector
from thinwire.methods.families.sparse import Sparse, WithRatio


@dataclass(frozen=True)
class TopK(Sparse, WithRatio):
    """Every rank sends its k largest entries; what it does not send it adds to its next gradient.

    u_i = g_i + e_i;  c_i = top_k(u_i);  e_i = u_i - c_i;  out = (1/W) sum_i c_i

    The selection is exact and by magnitude, k = max(1, ratio * n).

    Args:
        ratio: the part of the entries that is sent.
        feedback, values, scope, reduce, warmup: as for all methods that select their own indices.

    Example:
        >>> from thinwire.methods import TopK
        >>> str(TopK(ratio=0.001, scope="model"))
        "topk(ratio=0.001, scope='model')"

    Reference: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017;
    Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018; the split reduction follows the idea of
    Li and Hoefler, "Near-optimal sparse allreduce", 2022.

    Differences from the paper: the error is kept in units of the gradient, not of gradient times step
    size, so a change of the learning rate applies to it as well.
    """

    name: ClassVar[str] = "topk"

    def selector(self, ch: Channel) -> Selector:
        return Largest()

    def density(self) -> float:
        return self.ratio

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, values=None, reduce="gather")
