"""The family in which every rank selects coordinates of its own: selector, memory, codes and reduction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange
from thinwire.core.layout import Layout
from thinwire.core.traits import Scope, Traits
from thinwire.errors import ConfigError, PayloadError
from thinwire.methods.families import indices as index_code
from thinwire.methods.families.memories import Residual, SparseMemory
from thinwire.methods.families.quantised import Quantised
from thinwire.methods.families.selectors import Selector, kept
from thinwire.net.frames import parts_bytes

# A density ramp begins here, as in "Deep gradient compression".
FIRST_RATIO = 0.25


@dataclass(frozen=True)
class WithRatio(Exchange):
    """The option that most sparse methods have."""

    ratio: float = 0.01

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)


@dataclass(frozen=True)
class Sparse(Exchange):
    """u = g + e;  c = select(u);  e = u - c;  out = (1/W) sum c.

    Options of all methods of this family:
        feedback: keep what is not sent, and add it to the next gradient.
        values: a quantising method, such as qsgd(bits=4), that codes the values sent; what that loses
            is kept as well.
        scope: select in each "tensor" by itself, in each "bucket", or in the whole "model".
        reduce: "gather" brings everybody's entries to everybody, which costs (W-1) payloads; "split" gives
            every rank a range of coordinates to add up and to select from again, so that the cost does
            not grow with W; what is cut goes back into the residual. "auto" takes the one with less time.
        warmup: steps during which the density falls from 25 % to its value, exponentially.
    """

    feedback: bool = True
    values: Quantised | None = None
    scope: Scope = "tensor"
    reduce: Literal["auto", "gather", "split"] = "auto"
    warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        checks.flag(self.name, "feedback", self.feedback)
        checks.one_of(self.name, "scope", self.scope, ("tensor", "bucket", "model"))
        checks.one_of(self.name, "reduce", self.reduce, ("auto", "gather", "split"))
        checks.at_least(self.name, "warmup", self.warmup, 0)
        codec = cast(object, self.values)
        if codec is not None and not isinstance(codec, Quantised):
            raise ConfigError(
                f"{self.name}: values must be a method that codes every entry, such as QSGD(bits=4), not "
                f"{self.values!r}; in a method string write {self.name}(values=qsgd(bits=4))"
            )

    @abstractmethod
    def selector(self, ch: Channel) -> Selector: ...

    @abstractmethod
    def density(self) -> float:
        """About which part of the entries is sent."""

    @property
    def varies(self) -> bool:
        """Whether ranks may select different numbers of entries."""
        return False

    @property
    def traits(self) -> Traits:
        fixed = self.reduce == "gather" and not self.varies
        payload = "fixed" if fixed else "data-dependent"
        return Traits(conserves=self.feedback, payload=payload, scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        codec = self.values
        own = ("finite", "selection", "feedback", "scatter", "indices")
        return own + (() if codec is None else codec.kernel_families)

    @property
    def warning(self) -> str | None:
        codec = self.values
        if codec is None or codec.name in PROVEN_CODECS.get((self.name, self.reduce == "gather"), ()):
            return None
        return f"{self}: values coded by {codec.name} have not passed the convergence law with {self.name}"

    def init(self, layout: Layout) -> Residual:
        return Residual.for_layout(layout, self.feedback)

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        with SparseMemory(state.error, x, out) as memory:
            await self.send(memory, out, state, ch)

    async def send(self, memory: SparseMemory, out: torch.Tensor, state: Residual, ch: Channel) -> None:
        """Take entries out of the memory, exchange them, settle."""
        n = out.numel()
        k = self.count(n, ch.step)
        indices, values = memory.take(self.selector(ch), k)
        if self.splits(n, k, ch.size):
            await self._split(indices, values, memory, state, out, k, ch)
        else:
            await self._gather(indices, values, memory, out, ch)

    async def _gather(
        self,
        indices: torch.Tensor,
        values: torch.Tensor,
        memory: SparseMemory,
        out: torch.Tensor,
        ch: Channel,
    ) -> None:
        n = out.numel()
        mine, unsent = self._encode(indices, values, n, ch.private_seed())
        received = await ch.gather(mine, ragged=self.varies)
        decoded = [self._decode(parts, n) for parts in received]
        keep = await ch.commit(_finite([theirs for _, theirs in decoded]))
        memory.close(keep, unsent)
        kernels.scatter_mean([where for where, _ in decoded], [what for _, what in decoded], out)

    async def _split(
        self,
        indices: torch.Tensor,
        values: torch.Tensor,
        memory: SparseMemory,
        state: Residual,
        out: torch.Tensor,
        k: int,
        ch: Channel,
    ) -> None:
        """Every rank owns a range of coordinates: it adds up what all have there and keeps the largest."""
        n = out.numel()
        share, quota = -(-n // ch.size), -(-k // ch.size)
        begins = torch.arange(0, share * ch.size + 1, share, device=indices.device)
        ends = cast("list[int]", torch.searchsorted(indices, begins).tolist())
        pieces: list[list[torch.Tensor]] = []
        unsent: list[torch.Tensor] = []
        for owner in range(ch.size):
            mine = slice(ends[owner], ends[owner + 1])
            parts, lost = self._encode(
                indices[mine] - owner * share, values[mine], share, ch.private_seed() + owner
            )
            pieces.append(parts)
            unsent.append(torch.zeros_like(values[mine]) if lost is None else lost)
        received = [self._decode(parts, share) for parts in await ch.scatter(pieces, ragged=True)]
        reduced = torch.empty(share, device=out.device)
        kernels.scatter_mean([where for where, _ in received], [what for _, what in received], reduced)
        # A non-finite sum ranks first, so that everybody hears of it.
        where, what = kernels.topk(reduced, min(quota, share))
        parts, lost = self._encode(where, what, share, ch.private_seed() - 1)
        gathered = [self._decode(parts, share) for parts in await ch.gather(parts)]
        keep = await ch.commit(_finite([theirs for _, theirs in gathered]))
        memory.close(keep, torch.cat(unsent))
        if keep and self.feedback:
            reduced[where.long()] = 0 if lost is None else lost
            begin = ch.rank * share
            own = state.error[begin : begin + share]
            own += reduced[: own.numel()] * ch.size
        kernels.scatter_mean(*_joined(gathered, share, n), out)

    def payload_bytes(self, layout: Layout, size: int) -> int | None:
        n = layout.numel
        k = self.count(n, self.warmup)
        if self.varies or self.splits(n, k, size):
            return None
        return index_code.code_bytes(n, k) + self._value_bytes(k)

    def count(self, n: int, step: int) -> int:
        """How many entries are sent at this step."""
        ratio = self.density()
        if step < self.warmup:
            done = (step + 1) / (self.warmup + 1)
            ratio = max(ratio, FIRST_RATIO ** (1 - done) * ratio**done)
        return kept(ratio, n)

    def splits(self, n: int, k: int, size: int) -> bool:
        """A pure function of what all ranks know: two rounds more, against (W-1) payloads."""
        if self.reduce != "auto" or size == 1:
            return self.reduce == "split" and size > 1
        payload = index_code.code_bytes(n, k) + self._value_bytes(k)
        gather = (size - 1) * payload
        split = 2 * payload * (size - 1) / size + (size - 1) * SPLIT_OVERHEAD_BYTES
        return split + ROUNDS_IN_BYTES < gather

    # -- codes -----------------------------------------------------------------------------------------

    def _encode(
        self, indices: torch.Tensor, values: torch.Tensor, n: int, seed: int
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Parts for the wire, and what the value codec lost, if there is one."""
        codec = self.values
        coded = index_code.encode(indices, n)
        if codec is None:
            return [coded, values], None
        count = torch.tensor([indices.numel()], dtype=torch.int32, device=indices.device)
        parts = codec.encode(values, seed)
        return [coded, count, *parts], values - codec.decode([parts], values.numel())

    def _decode(self, parts: Sequence[torch.Tensor], n: int) -> tuple[torch.Tensor, torch.Tensor]:
        codec = self.values
        if codec is None:
            coded, values = parts
            return index_code.decode(coded, n, values.numel()), values
        coded, count, *rest = parts
        if count.numel() != 1:
            raise PayloadError(f"{count.numel()} counts came with coded values, expected one")
        k = int(count[0])
        indices = index_code.decode(coded, n, k)
        if codec.code_bytes(k) != parts_bytes(rest):
            raise PayloadError(f"the coded values do not have the length of {k} entries")
        return indices, codec.decode([rest], k)

    def _value_bytes(self, k: int) -> int:
        codec = self.values
        return 4 * k if codec is None else COUNT_BYTES + codec.code_bytes(k)


# Composable is not convergent. These pairs pass the law (tests/laws); the flag says whether only in a gather.
PROVEN_CODECS: dict[tuple[str, bool], tuple[str, ...]] = {
    ("topk", False): ("qsgd", "natural", "efsign", "onebit"),
    ("topk", True): ("qsgd", "natural", "efsign", "onebit", "terngrad"),
    ("gaussiank", False): ("qsgd", "onebit"),
    ("gaussiank", True): ("qsgd", "onebit"),
    ("threshold", False): ("qsgd",),
    ("threshold", True): ("qsgd",),
    ("dgc", False): ("qsgd",),
    ("dgc", True): ("qsgd",),
}
COUNT_BYTES = 4
# What one more piece costs beside its entries: a header, a table of lengths, its own length.
SPLIT_OVERHEAD_BYTES = 48
# Two more rounds, as the bytes a 1 Gbit/s link carries in two round trips of 50 microseconds.
ROUNDS_IN_BYTES = 2 * 6_250


def _finite(values: Sequence[torch.Tensor]) -> bool:
    return all(kernels.all_finite(theirs) for theirs in values)


def _joined(
    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], share: int, n: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The owners' entries as one list; the last ranges reach beyond n, where only zeros may be."""
    where = torch.cat([indices + owner * share for owner, (indices, _) in enumerate(pieces)])
    what = torch.cat([values for _, values in pieces])
    inside = where < n
    if bool(inside.all()):
        return [where], [what]
    beyond: Any = what[~inside]
    if bool((beyond != 0).any()):
        raise PayloadError(f"a rank sent entries beyond a tensor of {n}")
    return [where[inside].contiguous()], [what[inside].contiguous()]
