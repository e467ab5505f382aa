"""ScaleCom: the ranks take turns to choose the coordinates for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Scope, Traits
from thinwire.errors import ConfigError, PayloadError
from thinwire.kernels.scatter import ascending_in_range
from thinwire.methods.families import indices as index_code
from thinwire.methods.families.memories import Residual
from thinwire.methods.families.selectors import kept

# An offset in a chunk travels in one byte or in two.
LONGEST_CHUNK = 2**16


@dataclass(frozen=True)
class ScaleCom(Exchange):
    """A leader, another one each step, names its k largest entries; all ranks send theirs there.

    p_i = m_i + g_i;  l = t mod W;  I = top_k(p_l), from rank l to all
    out[I] = (1/W) sum_i p_i[I];  m_i = m_i + beta (g_i - p_i on I)

    Since all send the same coordinates, values are added on the way, and the cost does not grow with W:
    the leader's indices in one broadcast, then one mean of k values. m is beta times what is still owed:
    sum of all that was sent + m / beta = sum of all gradients.

    Args:
        ratio: the part of the entries that is sent, k = max(1, ratio * n).
        beta: below 1 the memory is a low-pass filter: what is added to it, and what is paid back at once,
            is that part of what was not sent. For large batches 0.1 to 0.3.
        chunk: instead of the k largest, the largest of every `chunk` entries: the quasi-sort of the paper,
            one pass, in place of `ratio` (the part sent is 1/chunk).
        scope: choose in each "tensor" by itself, in each "bucket", or in the whole "model".

    Reference: Chen et al., "ScaleCom: scalable sparsified gradient compression for
    communication-efficient distributed training", 2020.

    Differences from the paper: the exact selection is the default, the paper's chunks are an option; all
    tensors of one step have the same ratio (use `route` for rates by layer).
    """

    name: ClassVar[str] = "scalecom"
    ratio: float = 0.01
    beta: float = 1.0
    chunk: int | None = None
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        checks.positive(self.name, "beta", self.beta)
        if self.beta > 1:
            raise ConfigError(f"{self.name}: beta must be above 0 and up to 1, not {self.beta!r}")
        if self.chunk is not None:
            checks.at_least(self.name, "chunk", self.chunk, 2)
            if self.chunk > LONGEST_CHUNK:
                raise ConfigError(f"{self.name}: chunk must be up to {LONGEST_CHUNK}, not {self.chunk}")
        checks.one_of(self.name, "scope", self.scope, ("tensor", "bucket", "model"))

    @property
    def traits(self) -> Traits:
        return Traits(conserves=True, payload="alternating", scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return ("finite", "selection", "feedback", "scatter", "indices", "scalecom")

    def init(self, layout: Layout) -> Residual:
        return Residual.for_layout(layout)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        n, m = x.numel(), state.error
        leader = ch.step % ch.size
        if ch.rank == leader:
            code = self.encode(self.choose(m, x), n)
        else:
            code = torch.empty(self.code_bytes(n), dtype=torch.uint8, device=x.device)
        (code,) = await ch.broadcast([code], leader)
        indices = self.decode(code, n)
        where = indices.long()
        old = m[where]
        values = old + x[where]
        # The entry that is not finite may not be among those chosen: those then carry the news.
        if not kernels.all_finite(x):
            values.fill_(torch.nan)
        values = await ch.mean(values, values)
        if await ch.commit(kernels.all_finite(values)):
            if self.beta == 1:
                kernels.commit_feedback(m, x, indices)
            else:
                m.add_(x, alpha=self.beta)
                m[where] = (1 - self.beta) * old
        kernels.scatter_mean([indices], [values], out)

    def residual(self, state: Residual) -> torch.Tensor:
        return state.error / self.beta

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, beta=1.0, chunk=None)

    def payload_bytes(self, layout: Layout, size: int) -> int:
        """The leader's; the others send no indices."""
        return self.code_bytes(layout.numel) + 4 * self.count(layout.numel)

    # -- which coordinates, and their code -------------------------------------------------------------

    def count(self, n: int) -> int:
        return kept(self.ratio, n) if self.chunk is None else -(-n // self.chunk)

    def choose(self, m: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """The coordinates that this rank would choose, ascending."""
        if self.chunk is None:
            return kernels.select_feedback_topk(m, g, self.count(g.numel()))[0]
        return kernels.chunk_argmax_sum(m, g, self.chunk)

    def code_bytes(self, n: int) -> int:
        if self.chunk is None:
            return index_code.code_bytes(n, self.count(n))
        return self.count(n) * (1 if self.chunk <= 256 else 2)

    def encode(self, indices: torch.Tensor, n: int) -> torch.Tensor:
        if self.chunk is None:
            return index_code.encode(indices, n)
        offsets = indices % self.chunk
        if self.chunk <= 256:
            return offsets.to(torch.uint8)
        return offsets.to(torch.int16).view(torch.uint8)

    def decode(self, code: torch.Tensor, n: int) -> torch.Tensor:
        """The leader's coordinates, checked: a wrong one would read and write outside the tensor."""
        if self.chunk is None:
            indices = index_code.decode(code, n, self.count(n))
        else:
            wide = code.int() if self.chunk <= 256 else code.clone().view(torch.int16).int() & 0xFFFF
            begins = torch.arange(0, n, self.chunk, dtype=torch.int32, device=code.device)
            if wide.numel() != begins.numel() or bool((wide >= self.chunk).any()):
                raise PayloadError(f"the leader did not choose one entry of each {self.chunk}")
            indices = begins + wide
        if not ascending_in_range(indices, n):
            raise PayloadError(f"the leader's indices do not ascend within a tensor of {n}")
        return indices
