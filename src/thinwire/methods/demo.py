"""DeMo: decoupled momentum, sent as the largest coefficients of a cosine transform."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, Layout, Link, Slot, Traits, checks
from thinwire.errors import ConfigError
from thinwire.methods.families.cosine import CosineMomentum, chunks_of
from thinwire.methods.families.feedback import Entries
from thinwire.methods.families.sparse import SparseByRatio


@dataclass(frozen=True)
class DeMo(SparseByRatio):
    """Every rank sends what moves fastest in its momentum and keeps the rest; the step is a sign.

        m_i = beta m_i + g_i;  c_i = top_k by chunks(DCT(m_i));  m_i = m_i - DCT^-1(c_i)
        out = sign(DCT^-1((1/W) sum_i c_i))

    It owns the momentum: use `torch.optim.SGD` without momentum, at the learning rate of a sign method, about
    that of AdamW. SGD adds its weight decay to the signs: lr * weight_decay * w per step, as AdamW does. Of
    small tensors, half of the coefficients are sent.

    Args:
        beta: what is left of the momentum after a step. 1 forgets nothing.
        chunk: the longest side of a chunk. Sides are cut into equal pieces; 64 x 64 is fast.
        sign: the signed step of the paper. False gives the mean of what was sent, as other methods do.

    Differences from the paper: the momentum is in units of the gradient, not of gradient times learning rate.
    A coefficient is divided by W, not by the number of ranks that sent it. A side without equal pieces is
    padded, by less than one entry per piece.
    """

    name = "demo"
    use_when = """The link is very slow, and you can replace AdamW by signed steps: about 1 % of the bytes,
    and no state of an optimizer besides the momentum."""
    avoid_when = """You need your own optimizer: it owns the momentum, and Adam would divide its signs. Or the
    processor is the bottleneck: three cosine transforms per step."""
    formula = "index_bytes(coefficients, k) + 4 * k"
    formula_note = "where k is ratio times the coefficients of every chunk, at least one"
    compute = "three cosine transforms and a selection, one addition per received coefficient"
    reference = 'Peng, Quesnelle and Kingma, "DeMo: decoupled momentum optimization", 2024'
    proven_codes = ("qsgd",)
    beta: float = 0.999
    chunk: int = 64
    sign: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(self.name, "beta", self.beta)
        checks.whole(self.name, "chunk", self.chunk, 1, 512)
        checks.flag(self.name, "sign", self.sign)
        if not self.feedback or self.scope != "tensor":
            raise ConfigError(f"{self.name}: it needs feedback=True and scope='tensor', its defaults")

    @property
    def traits(self) -> Traits:
        conserves = self.beta == 1 and not self.sign
        return replace(super().traits, conserves=conserves, optimizer="no momentum")

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return (*super().kernel_families, "chunks", "dct")

    def assign(self, slot: Slot, *, small: bool) -> Exchange:
        return replace(self, ratio=max(self.ratio, 0.5)) if small else self

    def init(self, layout: Layout) -> CosineMomentum:
        return CosineMomentum(super().init(layout).error, chunks=chunks_of(layout, self.chunk))

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: CosineMomentum, ch: Channel) -> None:
        chunks, per = state.chunks, self._per(state.chunks, ch.step)
        # `out` is free until it is written, so it holds the new momentum if it can.
        m = out if out.dtype == torch.float32 else torch.empty(x.numel(), device=x.device)
        torch.add(x, state.error, alpha=self.beta, out=m)  # m = beta m + g
        coefficients = torch.empty(chunks.total, device=x.device)
        kernels.dct(m, chunks, coefficients)
        c = Entries(*kernels.chunk_topk(coefficients, per))  # c = top_k by chunks(DCT(m))
        mean = await self.average(c, chunks.total, c.indices.numel(), ch)
        if await ch.commit(mean.finite):
            state.subtract(m, c, mean.lost, coefficients)  # m = m - DCT^-1(c)
        mean.write(coefficients, ch)
        kernels.inverse_dct(coefficients, chunks, m)
        step = m.sign_() if self.sign else m  # out = sign(DCT^-1((1/W) sum c))
        out.copy_(step if ch.finite else step.fill_(torch.nan))  # the sign of infinity would be finite

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int | None:
        chunks = chunks_of(layout, self.chunk)
        k = self._per(chunks, self.warmup).total(chunks.total)
        return None if self.splits(chunks.total, k, size, link) else self.entry_bytes(chunks.total, k)

    def exact(self) -> Exchange:
        return replace(self, ratio=1.0, values=None, reduce="gather", sign=False)

    def _per(self, chunks: kernels.Chunks, step: int) -> kernels.PerChunk:
        return kernels.PerChunk(self.count(chunks.size, step), chunks.size)
