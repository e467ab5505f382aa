"""The family in which every rank selects its own entries: options, payload codes, two reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch

from thinwire import kernels
from thinwire.core import Channel, Exchange, HostWaits, Layout, Traits, checks
from thinwire.core.traits import Scope
from thinwire.errors import ConfigError, PayloadError
from thinwire.kernels.scatter import ascending_flag
from thinwire.methods.families import indices as index_code
from thinwire.methods.families.feedback import Entries, Residual
from thinwire.methods.families.quantised import Quantised
from thinwire.net.costs import Link
from thinwire.net.frames import parts_bytes

# A density ramp begins here, as in "Deep gradient compression".
FIRST_RATIO = 0.25
COUNT_BYTES = 4
# The bytes of one more piece besides its entries: a header, a table of lengths, its own length.
SPLIT_OVERHEAD_BYTES = 42
SPLIT_ROUNDS = 2
"""How many more rounds a split takes than a gather; a round has a hop to every other rank."""


def count_of(ratio: float, numel: int) -> int:
    """The number of entries that a ratio selects out of `numel`: at least one, if there is one."""
    return min(numel, max(1, int(ratio * numel)))


def check_scale(method: str, scale: object, feedback: bool) -> None:
    """The option `scale` of rules that draw at random: it says what is done without feedback."""
    checks.one_of(method, "scale", scale, ("unbiased", None))
    if feedback and scale is None:
        raise ConfigError(f"{method}: scale is for feedback=False; with feedback nothing is scaled")


def split_pays(payload: float, size: int, link: Link) -> bool:
    """Whether a split reduction of payloads of so many bytes takes less time on this link than a gather."""
    split = 2 * payload * (size - 1) / size + (size - 1) * SPLIT_OVERHEAD_BYTES
    more = link.seconds(SPLIT_ROUNDS * (size - 1), split) + SPLIT_ROUNDS * link.operation
    return more < link.seconds(0, (size - 1) * payload)


@dataclass
class SparseMean:
    """The mean of the entries of all ranks, not yet written, and what this rank's entries lost in coding.

    Every value counts `weight` times. `n` is the length of the tensor, if the indices came from the wire. On
    a CPU decoders have checked them. On other devices they are part of the flag for the commit, so that the
    host waits once for everything.
    """

    entries: Sequence[Entries]
    lost: Sequence[tuple[torch.Tensor | slice, torch.Tensor]] = ()
    n: int | None = None
    weight: float = 1.0

    @property
    def finite(self) -> bool | torch.Tensor:
        finite = [kernels.finite_flag(theirs.values) for theirs in self.entries]
        return kernels.all_flags([*finite, *self._valid()])

    def _valid(self) -> list[bool | torch.Tensor]:
        n = self.n
        away = [] if n is None else [e for e in self.entries if e.indices.device.type != "cpu"]
        return [ascending_flag(theirs.indices, n or 0) for theirs in away]

    def refuse_invalid(self) -> None:
        """Raise PayloadError if there are indices that do not ascend within the tensor."""
        if not bool(kernels.all_flags(self._valid())):
            raise PayloadError(f"the indices of a payload do not ascend within a tensor of {self.n}")

    def write(self, out: torch.Tensor, ch: Channel | None = None) -> None:
        if ch is not None and ch.finite is False:
            self.refuse_invalid()
        values = [e.values if self.weight == 1 else self.weight * e.values for e in self.entries]
        kernels.scatter_mean([e.indices for e in self.entries], values, out)


@dataclass(frozen=True)
class Sparse(Exchange):
    """u = g + e;  c = select(u);  e = u - c;  out = (1/W) sum c.

    Args:
        feedback: keep what is not sent and add it to the next gradient.
        values: a quantising method, such as qsgd(bits=4), that codes the values that are sent. What the code
            loses is added to the next gradient as well.
        scope: select in each "tensor", in each "bucket", or in the whole "model".
        reduce: "gather" sends the entries of every rank to every rank, which costs (W-1) payloads. "split"
            gives every rank a range of coordinates: it adds up the entries there and selects again. Its cost
            does not grow with W, and what it drops goes back into the residual. "auto" takes the faster one.
        warmup: the number of steps in which the density falls exponentially from 25 % to `ratio`.
    """

    family = "sparse"
    rounds_per_step = "1 (a gather), or 3 with the split reduction, which is faster with many ranks"
    compute = "one pass to select and to update the residual, one addition per received entry"
    ragged: ClassVar[bool] = False
    """Whether the ranks may select different numbers of entries."""
    # Not every combination converges: these codes of values pass the convergence law with the method.
    proven_codes: ClassVar[tuple[str, ...]] = ()
    proven_codes_in_a_gather: ClassVar[tuple[str, ...]] = ()

    feedback: bool = True
    values: Quantised | None = None
    scope: Scope = "tensor"
    reduce: Literal["auto", "gather", "split"] = "auto"
    warmup: int = 0

    def __post_init__(self) -> None:
        checks.flag(self.name, "feedback", self.feedback)
        checks.scope(self.name, self.scope)
        checks.one_of(self.name, "reduce", self.reduce, ("auto", "gather", "split"))
        checks.whole(self.name, "warmup", self.warmup, 0)
        codec = cast(object, self.values)
        if codec is not None and not isinstance(codec, Quantised):
            raise ConfigError(
                f"{self.name}: values must be a method that codes every entry, such as QSGD(bits=4), not "
                f"{self.values!r}; in a method string write {self.name}(values=qsgd(bits=4))"
            )
        if self.values is not None and self.values.rotate:
            raise ConfigError(
                f"{self.name}: the entries that are sent cannot be rotated; leave out rotate=True"
            )

    @property
    def host_waits(self) -> HostWaits:
        plain, split = super().host_waits, self.reduce == "split"
        more = 4 * split + (0 if self.values is None else 1 + split)
        why = "a split reduction" * split or "the counts of coded values" * (self.values is not None)
        told = ", ".join(filter(None, (plain.why, why)))
        return plain._replace(per_tensor=plain.per_tensor + more, why=told)

    @property
    def traits(self) -> Traits:
        fixed = self.reduce == "gather" and not self.ragged
        payload = "fixed" if fixed else "data-dependent"
        return Traits(conserves=self.feedback, payload=payload, scope=self.scope)

    @property
    def kernel_families(self) -> tuple[str, ...]:
        own = ("finite", "selection", "feedback", "scatter", "indices")
        return own + (() if self.values is None else self.values.kernel_families)

    @property
    def warning(self) -> str | None:
        proven = self.proven_codes + (self.proven_codes_in_a_gather if self.reduce == "gather" else ())
        if self.values is None or self.values.name in proven:
            return None
        code = self.values.name
        return f"{self}: values coded by {code} have not passed the convergence law with {self.name}"

    def init(self, layout: Layout) -> Residual:
        return Residual.for_layout(layout, self.feedback)

    # -- the two reductions ----------------------------------------------------------------------------

    async def average(self, c: Entries, n: int, k: int, ch: Channel) -> SparseMean:
        """The mean of c over all ranks: about k entries of n."""
        if self.splits(n, k, ch.size, ch.link):
            return await self._split(c, n, k, ch)
        parts, lost = self._encode(c, n, ch.private_seed())
        received = await ch.gather(
            parts, longest=self._longest(parts, n, self.most(n, k)) if self.ragged else None
        )
        entries = self._decode(received, n, ch.rank, c)
        return SparseMean(entries, [] if lost is None else [(c.indices.long(), lost)], n)

    async def _split(self, c: Entries, n: int, k: int, ch: Channel) -> SparseMean:
        """Every rank owns a range of coordinates: it adds up all entries there and selects the largest."""
        share, quota = -(-n // ch.size), -(-k // ch.size)
        begins = torch.arange(0, share * ch.size + 1, share, device=c.indices.device)
        ends = cast("list[int]", torch.searchsorted(c.indices, begins).tolist())
        own_piece = c
        pieces: list[list[torch.Tensor]] = []
        lost: list[tuple[torch.Tensor | slice, torch.Tensor]] = []
        for owner in range(ch.size):
            mine = slice(ends[owner], ends[owner + 1])
            piece = Entries(c.indices[mine] - owner * share, c.values[mine])
            parts, missing = self._encode(piece, share, ch.private_seed() + owner)
            pieces.append(parts)
            own_piece = piece if owner == ch.rank else own_piece
            if missing is not None:
                lost.append((c.indices[mine].long(), missing))
        scattered = await ch.scatter(
            pieces, longest=self._longest(pieces[ch.rank], share, min(share, self.most(n, k)))
        )
        received = SparseMean(self._decode(scattered, share, ch.rank, own_piece), n=share)
        reduced = torch.empty(share, device=c.values.device)
        received.refuse_invalid()  # these are used before the step's commit
        received.write(reduced)
        # A non-finite sum counts as the largest, so every rank receives it.
        largest = Entries(*kernels.topk(reduced, min(quota, share)))
        parts, missing = self._encode(largest, share, ch.private_seed() - 1)
        gathered = self._decode(await ch.gather(parts), share, ch.rank, largest)
        reduced[largest.indices.long()] = 0 if missing is None else missing
        own = slice(min(n, ch.rank * share), min(n, (ch.rank + 1) * share))
        lost.append((own, reduced[: own.stop - own.start] * ch.size))
        return SparseMean([_joined(gathered, share, n)], lost, n)

    def splits(self, n: int, k: int, size: int, link: Link) -> bool:
        """Whether two more rounds cost less than (W-1) payloads. All ranks know the inputs and agree."""
        if self.reduce != "auto" or size == 1:
            return self.reduce == "split" and size > 1
        return split_pays(self.entry_bytes(n, k), size, link)

    # -- codes -----------------------------------------------------------------------------------------

    def entry_bytes(self, n: int, k: int) -> int:
        """The bytes of k entries of n."""
        codec = self.values
        return index_code.code_bytes(n, k) + (4 * k if codec is None else COUNT_BYTES + codec.code_bytes(k))

    def _encode(self, c: Entries, n: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Parts for the wire, and what the code of the values lost, if they are coded."""
        codec = self.values
        coded = index_code.encode(c.indices, n)
        if codec is None:
            return [coded, c.values], None
        count = torch.tensor([c.indices.numel()], dtype=torch.int32, device=c.indices.device)
        parts = codec.encode(c.values, seed)
        return [coded, count, *parts], c.values - codec.decode([parts], c.values.numel())

    def most(self, n: int, k: int) -> int:
        """The largest number of entries that a rank selects: of other ranks, no more is accepted."""
        return n if self.ragged else k

    def _longest(self, parts: Sequence[torch.Tensor], n: int, most: int) -> list[int]:
        """The largest lengths of these parts, if so many of n entries are sent."""
        indices = min(index_code.longest(n), 4 * most)
        if self.values is None:
            return [indices, most]
        coded = self.values.code_bytes(most)
        return [indices, 1, *(coded // part.element_size() for part in parts[2:])]

    def _decode(
        self, received: Sequence[Sequence[torch.Tensor]], n: int, rank: int, own: Entries
    ) -> list[Entries]:
        """The entries of all ranks. This rank has its `own` already, unless their values are coded."""
        codec = self.values
        if codec is None:
            return [
                own if number == rank else Entries(index_code.decode(code, n, v.numel()), v)
                for number, (code, v) in enumerate(received)
            ]
        for _, count, *_ in received:
            if count.numel() != 1:
                raise PayloadError(f"{count.numel()} counts came with coded values; expected one")
        counts = cast("list[int]", torch.cat([parts[1] for parts in received]).tolist())
        entries: list[Entries] = []
        for k, (code, _, *rest) in zip(counts, received, strict=True):
            indices = index_code.decode(code, n, k)
            if codec.code_bytes(k) != parts_bytes(rest):
                raise PayloadError(f"the coded values do not have the length of {k} entries")
            if k == 0 and not bool(codec.finite([rest])):
                raise PayloadError("a code of no entries has a scale that is not finite")
            entries.append(Entries(indices, codec.decode([rest], k)))
        return entries


@dataclass(frozen=True)
class _RatioOption(Exchange):
    ratio: float = 0.01


@dataclass(frozen=True)
class SparseByRatio(Sparse, _RatioOption):
    """The members of the family that send k = max(1, ratio * n) entries, exactly or about.

    Args:
        ratio: the share of the entries that is sent.
    """

    def __post_init__(self) -> None:
        checks.ratio(self.name, self.ratio)
        super().__post_init__()

    def count(self, n: int, step: int) -> int:
        """k in this step; larger during the warm-up."""
        ratio = self.ratio
        if step < self.warmup:
            done = (step + 1) / (self.warmup + 1)
            ratio = max(ratio, FIRST_RATIO ** (1 - done) * ratio**done)
        return count_of(ratio, n)

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int | None:
        n = layout.numel
        k = self.count(n, self.warmup)
        return None if self.ragged or self.splits(n, k, size, link) else self.entry_bytes(n, k)

    def exact(self) -> Exchange | None:
        return replace(self, ratio=1.0, values=None, reduce="gather")


def _joined(pieces: Sequence[Entries], share: int, n: int) -> Entries:
    """The entries of all owners as one list. The last ranges reach beyond n; only zeros may be there."""
    where = torch.cat([piece.indices + owner * share for owner, piece in enumerate(pieces)])
    what = torch.cat([piece.values for piece in pieces])
    inside = where < n
    if bool(inside.all()):
        return Entries(where, what)
    beyond: Any = what[~inside]
    if bool((beyond != 0).any()):
        raise PayloadError(f"a rank sent entries beyond the end of a tensor of {n}")
    return Entries(where[inside].contiguous(), what[inside].contiguous())
