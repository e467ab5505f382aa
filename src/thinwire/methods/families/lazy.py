"""The lazy family: how an upload is coded, how uploads reach all ranks, and the state between steps.

In a step every rank codes the difference to its last upload, the ranks exchange flags, the uploads are sent,
and every rank updates the same sum of last uploads. `lazy_rules.py` says when a rank skips its upload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from thinwire import kernels
from thinwire.core import (
    Channel,
    Exchange,
    HostWaits,
    Layout,
    Link,
    Slot,
    State,
    Traits,
    checks,
    momentum,
    own,
    replicated,
)
from thinwire.errors import PayloadError, ThinwireError
from thinwire.methods.families import lazy_rules as rules
from thinwire.net import costs

# The flag of a rank, one byte. FRESH: it has no last upload. BROKEN: its gradient is not finite.
SKIP, UPLOAD, FRESH, BROKEN = range(4)
# Bits per entry of an upload that is not quantised: float32, or float64, which loses nothing.
UNCODED, EXACT = 32, 64
WIDTHS = (*range(1, 9), UNCODED)


# -- uploads -----------------------------------------------------------------------------------------------


class Upload(NamedTuple):
    """The coded difference to the last upload.

    `size` is the squared norm of the difference as the other ranks decode it. `error` is the squared norm of
    what the code loses. They are not finite if the gradient is not.
    """

    parts: list[torch.Tensor]
    size: float
    error: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.size + self.error)


@dataclass(frozen=True)
class Coder:
    """Codes differences as floats, or with a few bits per entry on LAQ's grid, one grid per tensor.

    The radius R of a tensor is its largest absolute entry. Its grid reaches from -R to R, so the error of an
    entry is at most R / (2^bits - 1), and a tensor that has not changed is decoded as 0. The difference is
    taken to the last upload as the other ranks decoded it, so what a code loses is part of the next one.

    Args:
        bits: per entry.
        tensors: the number of entries of each tensor; None for a single tensor. The codes of each tensor
            begin at a whole byte.
    """

    bits: int
    tensors: tuple[int, ...] | None = None

    @property
    def _floats(self) -> bool:
        return self.bits in (UNCODED, EXACT)

    def encode(self, x: torch.Tensor, last: torch.Tensor) -> Upload:
        difference = x.to(torch.float64, copy=True).sub_(last)
        if self.bits != EXACT:
            difference = difference.float()
        if self._floats:
            return Upload([difference], squared_norm(difference), 0.0)
        codes: list[torch.Tensor] = []
        radii: list[float] = []
        size = error = 0.0
        for piece in _split(difference, self._cuts(difference.numel())):
            zeros = torch.zeros_like(piece)
            packed, radius = kernels.laq_quantise(piece, zeros, self.bits)
            decoded, lost = math.nan, math.nan
            if math.isfinite(radius):
                decoded, lost = kernels.laq_norms(piece, zeros, packed, radius, self.bits)
            codes.append(packed)
            radii.append(radius)
            size += decoded
            error += lost
        parts = [torch.cat(codes), torch.tensor(radii, dtype=torch.float32, device=x.device)]
        return Upload(parts, size, error)

    def decode(
        self, parts: Sequence[torch.Tensor], n: int, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The difference, in `workspace` or in new memory, or as it was received.

        Raises PayloadError if these parts are not a difference of n entries.
        """
        if self._floats:
            if parts[0].numel() != n:
                raise PayloadError(f"an upload has {parts[0].numel()} entries instead of {n}")
            return parts[0]
        packed, radii = parts
        cuts = self._cuts(n)
        lengths = [self._code_bytes(count) for count in cuts]
        if packed.numel() != sum(lengths) or radii.numel() != len(cuts):
            raise PayloadError(
                f"an upload of {len(cuts)} tensors has {sum(lengths)} bytes of codes and {len(cuts)} radii, "
                f"not {packed.numel()} bytes and {radii.numel()} radii"
            )
        difference = torch.zeros(n, device=packed.device) if workspace is None else workspace.zero_()
        pieces, codes = _split(difference, cuts), _split(packed, lengths)
        for piece, code, radius in zip(pieces, codes, cast("list[float]", radii.tolist()), strict=True):
            kernels.laq_apply(piece, code, radius, self.bits)
        return difference

    def blanks(self, n: int, device: torch.device) -> list[torch.Tensor]:
        """Empty parts of the right sizes, to receive into."""
        if self._floats:
            return [torch.empty(n, dtype=torch.float64 if self.bits == EXACT else None, device=device)]
        cuts = self._cuts(n)
        packed = torch.zeros(sum(map(self._code_bytes, cuts)), dtype=torch.uint8, device=device)
        return [packed, torch.zeros(len(cuts), device=device)]

    def payload_bytes(self, n: int) -> int:
        if self._floats:
            return self.bits // 8 * n
        return sum(self._code_bytes(count) + 4 for count in self._cuts(n))

    def transport(self, uploaders: int, size: int, n: int) -> str:
        """How so many uploads of n entries reach all ranks; see `cheapest_upload`."""
        return costs.cheapest_upload(uploaders, size, self.payload_bytes(n), 4 * n, 4 * n)

    def _cuts(self, n: int) -> list[int]:
        return [n] if self.tensors is None else list(self.tensors)

    def _code_bytes(self, n: int) -> int:
        return -(-n * self.bits // 8)


# -- how uploads reach all ranks ---------------------------------------------------------------------------


def check_flags(flags: list[int]) -> list[int]:
    for rank, flag in enumerate(flags):
        if flag > BROKEN:
            raise PayloadError(f"rank {rank} sent the flag {flag}, which this version does not know")
    return flags


class Sums(NamedTuple):
    """This rank's last upload, and the sum of the last uploads of all ranks.

    Both are float64: adding float32 differences loses next to nothing, so `total` stays the sum of `last`
    over all ranks for any number of steps.
    """

    last: torch.Tensor
    total: torch.Tensor


class Decoder:
    """Decodes uploads as float64, in memory of its own: what `difference` returns holds until the next call.

    Adding float32 to float64 in one operation takes several times as long as converting it first.
    """

    def __init__(self, coder: Coder, like: torch.Tensor) -> None:
        self._coder = coder
        self._narrow = torch.empty_like(like, dtype=torch.float32)
        self._wide = torch.empty_like(like)

    def difference(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.wide(self._coder.decode(parts, self._narrow.numel(), self._narrow))

    def wide(self, values: torch.Tensor) -> torch.Tensor:
        return self._wide.copy_(values)


async def broadcast_uploads(
    sums: Sums, uploaders: Sequence[int], mine: Upload, coder: Coder, ch: Channel
) -> Sums:
    """Every uploader broadcasts its difference."""
    last, total, decoder = sums.last, sums.total.clone(), Decoder(coder, sums.last)
    for rank in uploaders:
        parts = mine.parts if rank == ch.rank else coder.blanks(last.numel(), last.device)
        difference = decoder.difference(await ch.broadcast(parts, rank))
        total += difference
        if rank == ch.rank:
            last = last + difference
    return Sums(last, total)


async def collect_uploads(
    sums: Sums, uploaders: Sequence[int], mine: Upload, coder: Coder, ch: Channel
) -> Sums:
    """A star: the first uploader collects the differences of the others and broadcasts the sum."""
    last, decoder = sums.last, Decoder(coder, sums.last)
    root, *others = uploaders
    uploads = ch.rank in uploaders
    parts = mine.parts if uploads else coder.blanks(last.numel(), last.device)
    received = await ch.collect(parts, root, others)
    summed = torch.zeros_like(last)
    for theirs in ([mine.parts] if ch.rank == root else []) + received:
        summed += decoder.difference(theirs)
    (rounded,) = await ch.broadcast([summed.float()], root)
    if uploads:
        last = last + decoder.difference(mine.parts)
    sent = decoder.wide(rounded)
    total = sums.total + sent
    if ch.rank == root:  # the root's next difference includes what the sum lost in float32
        last += sent.sub_(summed)
    return Sums(last, total)


async def average_uploads(
    sums: Sums, uploads: bool, mine: Upload, x: torch.Tensor, coder: Coder, ch: Channel
) -> Sums:
    """One mean of the last uploads of all ranks, not of differences: it also removes old rounding errors."""
    if uploads and coder.bits == UNCODED:
        last = x.float()
    else:
        last = sums.last + Decoder(coder, sums.last).difference(mine.parts) if uploads else sums.last
        last = last.float()
    total = (await ch.mean(last)).double() * ch.size
    return Sums(last.double(), total)


# -- what is remembered ------------------------------------------------------------------------------------


@dataclass
class LazyState(State):
    """The state of a lazy method.

    last: this rank's last upload, as all ranks decoded it; total: the sum of `last` over all ranks
    moved: how far the parameters have moved since the last upload (rule "ps")
    steps: the squared lengths of the last steps, newest first; ranks: how many contributed to `total`
    anchor: the parameters at the last upload (LASG), or the last gradient (SLAQ); counts: see `Counts`
    lengths: the number of entries of each tensor; known from the layout, so not part of a checkpoint
    """

    last: torch.Tensor = momentum()
    total: torch.Tensor = momentum()
    moved: torch.Tensor = momentum()
    steps: torch.Tensor = replicated()
    ranks: torch.Tensor = replicated()
    anchor: torch.Tensor = own()
    counts: torch.Tensor = own()
    lengths: tuple[int, ...] = ()


class Counts(NamedTuple):
    """The counters of a rank: the steps since its last upload, the squared error of that upload's code
    (without the loss scale), the largest smoothness so far, the number of its uploads, and the squared
    difference between two successive gradients, as a running mean."""

    silence: int = 0
    error: float = 0.0
    smoothness: float = 0.0
    uploads: int = 0
    noise: float = 0.0

    @staticmethod
    def of(counts: torch.Tensor | Sequence[float]) -> Counts:
        numbers = cast("list[float]", counts.tolist()) if isinstance(counts, torch.Tensor) else counts
        silence, error, smoothness, uploads, noise = numbers
        return Counts(int(silence), error, smoothness, int(uploads), noise)

    def write(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.tensor(self))


# -- a step ------------------------------------------------------------------------------------------------


class Lazy(Exchange):
    """Base of LAG, LAQ, SLAQ and LASG: out = (1/W) sum_i (last upload of rank i).

    The papers have R = (1/(a W)^2) sum_d xi |theta_{k+1-d} - theta_{k-d}|^2 for sums of gradients and a step
    size a. With theta_{k+1} = theta_k - a W out_k this is R = xi sum_d |out_{k-d}|^2. If the optimizer is
    known, changes of the learning rate are taken into account.

    Args:
        window: D, the number of past steps in the rule.
        xi: the weight of each past step. 0 skips nothing.
        max_skip: the largest number of steps that a rank skips in a row.
    """

    family = "lazy"
    formula_note = "if every rank uploads; a rank that skips sends 1 byte"
    rounds_per_step = "1 for the flags, then none, 1 for a mean, 2 for a star, or 1 for each broadcast"
    compute = "a few passes over the gradient in float64"
    waits = HostWaits(6, why="the rule decides on the host: its counters, norms and the ranks' flags")

    window: int
    max_skip: int = 0
    bits: int = UNCODED

    def __post_init__(self) -> None:
        checks.whole(self.name, "window", self.window, 1)
        checks.optional(checks.not_negative, self.name, "xi", getattr(self, "xi"))  # noqa: B009 - of the method
        checks.whole(self.name, "max_skip", self.max_skip, 0)
        checks.one_of(self.name, "bits", self.bits, WIDTHS)

    @property
    def upload_bits(self) -> int:
        return self.bits

    @property
    def traits(self) -> Traits:
        return Traits(payload="alternating", optimizer="plain SGD", scope="model")

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return () if self.bits == UNCODED else ("laq",)

    def assign(self, slot: Slot, *, small: bool) -> Exchange:
        """All tensors, small ones too: an upload is skipped as a whole."""
        del slot, small
        return self

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        """The largest: if all ranks upload, as in the first step. A rank that skips only sends its flag."""
        n = layout.numel
        coder = Coder(self.bits, entries(layout))
        coded, transport = coder.payload_bytes(n), coder.transport(size, size, n)
        return 1 + {"broadcast": coded, "star": max(coded, 4 * n), "mean": 4 * n}[transport]

    def init(self, layout: Layout) -> LazyState:
        return self.new_state(layout)

    def new_state(self, layout: Layout, *, movement: bool = False, anchor: bool = False) -> LazyState:
        def zeros(count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=layout.device)

        n = layout.numel
        return LazyState(
            last=zeros(n),
            total=zeros(n),
            moved=zeros(n if movement else 0),
            steps=zeros(self.window),
            ranks=zeros(1, torch.int64),
            anchor=zeros(n if anchor else 0, torch.float32),
            counts=zeros(len(Counts())),
            lengths=entries(layout),
        )


class LazyStep:
    """A step of a lazy method on one rank. Squared norms do not include the loss scale.

    Attributes:
        counts: this rank's counters before the step.
        restarts: whether all ranks upload in full: in the first step, or if the number of ranks has changed.
        uploads: whether this rank uploads; known after the flags are exchanged.
    """

    def __init__(self, method: Lazy, x: torch.Tensor, state: LazyState, ch: Channel) -> None:
        self._x, self._state, self._ch = x, state, ch
        self._coder = Coder(method.bits, state.lengths)
        numbers = torch.cat([state.counts, state.ranks.double(), state.steps.sum().view(1)])  # read together
        *counts, ranks, self._squared_steps = cast("list[float]", numbers.tolist())
        self.counts = Counts.of(counts)
        self.restarts = int(ranks) != ch.size
        self.uploads = self._broken = False
        self._encode()

    def _encode(self) -> None:
        nothing = torch.zeros_like(self._state.last)
        self._sums = Sums(nothing, nothing) if self.restarts else Sums(self._state.last, self._state.total)
        self._upload = self._coder.encode(self._x, self._sums.last)

    @property
    def change(self) -> float:
        """|Q(now) - Q(last upload)|^2, of the difference as the other ranks would decode it."""
        return self._upload.size / self._ch.context.scale**2

    @property
    def error(self) -> float:
        """|e(now)|^2, of what the code of the difference loses."""
        return self._upload.error / self._ch.context.scale**2

    def squared_norm(self, x: torch.Tensor) -> float:
        return squared_norm(x) / self._ch.context.scale**2

    def bound(self, xi: float) -> float:
        return rules.bound(xi, self._squared_steps, self._ch.context.lr)

    async def exchange_flags(self, skip: bool) -> list[int]:
        """Send all ranks one byte that says whether this rank skips. Returns the ranks that upload."""
        if self.restarts and not self._ch.context.has_gradient:
            raise ThinwireError("all ranks begin again, but this one has not computed its gradient")
        usual = FRESH if self.restarts else SKIP if skip else UPLOAD
        flag = usual if self._upload.finite else BROKEN
        mine = torch.tensor([flag], dtype=torch.uint8, device=self._x.device)
        told = torch.cat([theirs for (theirs,) in await self._ch.gather([mine])])
        flags = check_flags(cast("list[int]", told.tolist()))
        if BROKEN in flags:
            self._broken = True
            return []
        if FRESH in flags and not self.restarts:
            if not self._ch.context.has_gradient:
                raise ThinwireError("another rank begins again, but this one has not computed its gradient")
            self.restarts = True
            self._encode()
        uploaders = [rank for rank, flag in enumerate(flags) if self.restarts or flag != SKIP]
        self.uploads = self._ch.rank in uploaders
        return uploaders

    async def mean_of_uploads(self, uploaders: Sequence[int]) -> torch.Tensor:
        """(1/W) sum_i (last upload of rank i), with the new uploads.

        NaN if the gradient of a rank is not finite: then nothing is sent.
        """
        if self._broken:
            return torch.full_like(self._sums.total, torch.nan)
        n, ch, coder = self._x.numel(), self._ch, self._coder
        transport = coder.transport(len(uploaders), ch.size, n)
        if transport == "mean":
            self._sums = await average_uploads(self._sums, self.uploads, self._upload, self._x, coder, ch)
        elif transport == "star":
            self._sums = await collect_uploads(self._sums, uploaders, self._upload, coder, ch)
        else:
            self._sums = await broadcast_uploads(self._sums, uploaders, self._upload, coder, ch)
        return self._sums.total / ch.size

    async def commit(self, mean: torch.Tensor) -> bool:
        """Store the uploads, the length of this step and the counters, if the step is committed."""
        squared, context, state = squared_norm(mean), self._ch.context, self._state
        if not await self._ch.commit(math.isfinite(squared)):
            return False
        state.last.copy_(self._sums.last)
        state.total.copy_(self._sums.total)
        state.ranks.fill_(self._ch.size)
        state.steps.copy_(state.steps.roll(1))
        state.steps[0] = squared * (context.lr / context.scale) ** 2
        counts = Counts(uploads=self.counts.uploads) if self.restarts else self.counts
        if self.uploads:
            counts = counts._replace(silence=0, error=self.error, uploads=counts.uploads + 1)
        else:
            counts = counts._replace(silence=counts.silence + 1)
        counts.write(state.counts)
        return True


def entries(layout: Layout) -> tuple[int, ...]:
    """The number of entries of each tensor. Empty tensors need no code."""
    return tuple(slot.numel for slot in layout.slots if slot.numel)


def squared_norm(x: torch.Tensor) -> float:
    norm: torch.Tensor = cast(Any, torch.linalg).vector_norm(x, dtype=torch.float64)
    return float(norm) ** 2


def _split(flat: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(cast("tuple[torch.Tensor, ...]", flat.split(lengths)))
