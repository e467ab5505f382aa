"""What the lazy methods share: how an upload is coded, how uploads reach all ranks, what is remembered.

A step in order: every rank codes the difference to its last upload, all ranks exchange flags, the uploads
travel, and every rank keeps the same sum of last uploads. When a rank skips is in `lazy_rules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from thinwire import kernels
from thinwire.core import checks
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State, momentum, own, replicated
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Traits
from thinwire.errors import PayloadError
from thinwire.methods.families import lazy_rules as rules
from thinwire.net import costs

# The flag of a rank, one byte. BROKEN: its gradient is not finite. FRESH: it has no last upload.
SKIP, UPLOAD, FRESH, BROKEN = range(4)
UNCODED = 32
"""Bits per entry of an upload that is not quantised: a float32."""
EXACT = 64
"""The same as a float64: nothing is lost on the way."""
WIDTHS = (1, 2, 4, 8, UNCODED)


# -- uploads -----------------------------------------------------------------------------------------------


class Upload(NamedTuple):
    """The difference to the last upload, coded.

    `size` and `error` are squared norms: of the difference as the others decode it, and of what the code
    loses. They are not finite if the gradient is not.
    """

    parts: list[torch.Tensor]
    size: float
    error: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.size + self.error)


@dataclass(frozen=True)
class Coder:
    """Codes differences as floats, or with a few bits per entry on LAQ's grid, one grid for each tensor.

    A tensor's radius R is its largest absolute entry. Its grid reaches from -R to R, so the error of an entry
    is at most R / (2^bits - 1), and a tensor that has not changed is decoded as 0. The difference is taken to
    what the others have of this rank, so what a code or a rounding loses is part of the next difference.

    Args:
        bits: per entry.
        tensors: how many entries each tensor has; None for a single tensor. The codes of each tensor begin
            at a whole byte.
    """

    bits: int
    tensors: tuple[int, ...] | None = None

    def encode(self, x: torch.Tensor, last: torch.Tensor) -> Upload:
        exact = x.double() - last
        difference = exact if self.bits == EXACT else exact.float()
        if self.bits in (UNCODED, EXACT):
            return Upload([difference], squared_norm(difference), 0.0)
        cuts = self._cuts(difference.numel())
        codes: list[torch.Tensor] = []
        radii: list[float] = []
        size = error = 0.0
        for piece, zeros in zip(
            _split(difference, cuts), _split(torch.zeros_like(difference), cuts), strict=True
        ):
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

    def decode(self, parts: Sequence[torch.Tensor], n: int) -> torch.Tensor:
        """Raises PayloadError if these bytes cannot be a difference of n entries."""
        if self.bits in (UNCODED, EXACT):
            return parts[0]
        packed, radii = parts
        cuts = self._cuts(n)
        lengths = [self._code_bytes(count) for count in cuts]
        if packed.numel() != sum(lengths) or radii.numel() != len(cuts):
            raise PayloadError(
                f"an upload of {len(cuts)} tensors has {sum(lengths)} bytes of codes and a radius for each, "
                f"not {packed.numel()} bytes and {radii.numel()} radii"
            )
        difference = torch.zeros(n, device=packed.device)
        numbers = cast("list[float]", radii.tolist())
        for piece, codes, radius in zip(
            _split(difference, cuts), _split(packed, lengths), numbers, strict=True
        ):
            kernels.laq_apply(piece, codes, radius, self.bits)
        return difference

    def blanks(self, n: int, device: torch.device) -> list[torch.Tensor]:
        """Parts of the right sizes, to receive into."""
        if self.bits in (UNCODED, EXACT):
            return [torch.empty(n, dtype=torch.float64 if self.bits == EXACT else None, device=device)]
        cuts = self._cuts(n)
        packed = torch.zeros(sum(map(self._code_bytes, cuts)), dtype=torch.uint8, device=device)
        return [packed, torch.zeros(len(cuts), device=device)]

    def payload_bytes(self, n: int) -> int:
        if self.bits in (UNCODED, EXACT):
            return self.bits // 8 * n
        return sum(self._code_bytes(count) + 4 for count in self._cuts(n))

    def _cuts(self, n: int) -> list[int]:
        return [n] if self.tensors is None else list(self.tensors)

    def _code_bytes(self, n: int) -> int:
        return -(-n * self.bits // 8)


# -- how uploads reach all ranks ---------------------------------------------------------------------------


def check_flags(flags: list[int]) -> list[int]:
    for rank, flag in enumerate(flags):
        if flag > BROKEN:
            raise PayloadError(f"rank {rank} sends the flag {flag}, which this version does not know")
    return flags


class Sums(NamedTuple):
    """This rank's last upload, and the sum of all ranks' last uploads.

    Both in float64, so that adding float32 differences to both loses next to nothing, and `total` stays the
    sum of the ranks' `last` over any number of steps.
    """

    last: torch.Tensor
    total: torch.Tensor


async def broadcast_uploads(
    sums: Sums, uploaders: Sequence[int], mine: Upload, coder: Coder, ch: Channel
) -> Sums:
    """Every uploader broadcasts its difference."""
    last, total, n = sums.last, sums.total.clone(), sums.last.numel()
    for rank in uploaders:
        parts = mine.parts if rank == ch.rank else coder.blanks(n, last.device)
        difference = coder.decode(await ch.broadcast(parts, rank), n)
        total += difference
        if rank == ch.rank:
            last = last + difference
    return Sums(last, total)


async def collect_uploads(
    sums: Sums, uploaders: Sequence[int], mine: Upload, coder: Coder, ch: Channel
) -> Sums:
    """A star: the first uploader collects the differences of the others and broadcasts their sum."""
    last, n = sums.last, sums.last.numel()
    root, *others = uploaders
    uploads = ch.rank in uploaders
    parts = mine.parts if uploads else coder.blanks(n, last.device)
    received = await ch.collect(parts, root, others)
    summed = torch.zeros(n, dtype=torch.float64, device=last.device)
    for theirs in ([mine.parts] if ch.rank == root else []) + received:
        summed += coder.decode(theirs, n)
    (rounded,) = await ch.broadcast([summed.float()], root)
    if uploads:
        last = last + coder.decode(mine.parts, n)
    if ch.rank == root:  # what the sum lost in float32 is part of the root's next difference
        last += rounded - summed
    return Sums(last, sums.total + rounded)


async def average_uploads(
    sums: Sums, uploads: bool, mine: Upload, x: torch.Tensor, coder: Coder, ch: Channel
) -> Sums:
    """One mean of all ranks' last uploads, not of differences: old rounding errors are gone as well."""
    if uploads and coder.bits == UNCODED:
        last = x.float()
    else:
        last = (sums.last + coder.decode(mine.parts, x.numel()) if uploads else sums.last).float()
    total = (await ch.mean(last)).double() * ch.size
    return Sums(last.double(), total)


# -- what is remembered ------------------------------------------------------------------------------------


@dataclass
class LazyState(State):
    """In the order of use.

    last: this rank's last upload, as all ranks have it; total: the sum of all ranks' `last`; moved: how far
    the parameters have moved since (rule "ps"); anchor: the parameters at the last upload (LASG).
    steps: squared lengths of the last steps, newest first; ranks: how many contributed to `total`.
    counts: see `Counts`.
    lengths: how many entries each tensor has; known from the layout, so not part of a checkpoint.
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
    """The counters of a rank: steps since its last upload, the squared error of that upload's code (free of
    the loss scale), the smoothness seen so far, and its uploads."""

    silence: int = 0
    error: float = 0.0
    smoothness: float = 0.0
    uploads: int = 0

    @staticmethod
    def of(tensor: torch.Tensor) -> Counts:
        silence, error, smoothness, uploads = cast("list[float]", tensor.tolist())
        return Counts(int(silence), error, smoothness, int(uploads))

    def write(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.tensor(self))


# -- a step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lazy(Exchange):
    """Base of LAG, LAQ, SLAQ and LASG: out = (1/W) sum_i (last upload of rank i).

    In the papers R = (1/(a W)^2) sum_d xi |theta_{k+1-d} - theta_{k-d}|^2 for sums of gradients and the step
    size a; with theta_{k+1} = theta_k - a W out_k this is R = xi sum_d |out_{k-d}|^2. Where the optimizer is
    known, a changing learning rate is taken into account.
    """

    @property
    def upload_bits(self) -> int:
        return UNCODED

    @property
    def traits(self) -> Traits:
        return Traits(payload="alternating", optimizer="plain SGD", scope="model")

    @property
    def kernel_families(self) -> tuple[str, ...]:
        return () if self.upload_bits == UNCODED else ("laq",)

    def assign(self, slot: Slot, *, small: bool) -> Exchange:
        """Small tensors as well: a skipped upload is skipped whole."""
        del slot, small
        return self

    def payload_bytes(self, layout: Layout, size: int) -> int:
        """The most: when all ranks upload, as in the first step. A rank that skips sends its flag only."""
        n = layout.numel
        coded = Coder(self.upload_bits, entries(layout)).payload_bytes(n)
        transport = costs.cheapest_upload(size, size, coded, 4 * n, 4 * n)
        return 1 + {"broadcast": coded, "star": max(coded, 4 * n), "mean": 4 * n}[transport]


def check_options(
    method: str, window: object, xi: object, max_skip: object = 0, bits: object = UNCODED
) -> None:
    checks.whole(method, "window", window, 1)
    checks.not_negative(method, "xi", xi)
    checks.whole(method, "max_skip", max_skip, 0)
    checks.one_of(method, "bits", bits, WIDTHS)


def lazy_state(layout: Layout, window: int, *, movement: bool = False, anchor: bool = False) -> LazyState:
    n, device = layout.numel, layout.device

    def zeros(count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    return LazyState(
        last=zeros(n),
        total=zeros(n),
        moved=zeros(n if movement else 0),
        steps=zeros(window),
        ranks=zeros(1, torch.int64),
        anchor=zeros(n if anchor else 0, torch.float32),
        counts=zeros(len(Counts())),
        lengths=entries(layout),
    )


class LazyStep:
    """One rank's step of a lazy method. Squared norms are free of the loss scale.

    Attributes:
        counts: this rank's counters before the step.
        restarts: whether all ranks upload in full: the first step, or a group of another size.
        uploads: whether this rank uploads; known once the flags are exchanged.
    """

    def __init__(self, method: Lazy, x: torch.Tensor, state: LazyState, ch: Channel) -> None:
        self._x, self._state, self._ch = x, state, ch
        self._coder = Coder(method.upload_bits, state.lengths)
        self.counts = Counts.of(state.counts)
        self.restarts = int(state.ranks) != ch.size
        self.uploads = self._broken = False
        self._encode()

    def _encode(self) -> None:
        nothing = torch.zeros_like(self._state.last)
        self._sums = Sums(nothing, nothing) if self.restarts else Sums(self._state.last, self._state.total)
        self._upload = self._coder.encode(self._x, self._sums.last)

    @property
    def change(self) -> float:
        """|Q(now) - Q(last upload)|^2: of the difference as the others would decode it."""
        return self._upload.size / self._ch.context.scale**2

    @property
    def error(self) -> float:
        """|e(now)|^2: of what the code of the difference loses."""
        return self._upload.error / self._ch.context.scale**2

    def squared_norm(self, x: torch.Tensor) -> float:
        return squared_norm(x) / self._ch.context.scale**2

    def bound(self, xi: float) -> float:
        return rules.bound(xi, float(self._state.steps.sum()), self._ch.context.lr)

    async def exchange_flags(self, skip: bool) -> list[int]:
        """Tell all ranks, in one byte, whether this one skips. Returns the ranks that upload."""
        flag = SKIP if skip else UPLOAD
        if self.restarts:
            flag = FRESH
        if not self._upload.finite:
            flag = BROKEN
        mine = torch.tensor([flag], dtype=torch.uint8, device=self._x.device)
        flags = check_flags([int(theirs[0]) for (theirs,) in await self._ch.gather([mine])])
        if BROKEN in flags:
            self._broken = True
            return []
        if FRESH in flags and not self.restarts:
            self.restarts = True
            self._encode()
        uploaders = [rank for rank, flag in enumerate(flags) if self.restarts or flag != SKIP]
        self.uploads = self._ch.rank in uploaders
        return uploaders

    async def mean_of_uploads(self, uploaders: Sequence[int]) -> torch.Tensor:
        """(1/W) sum_i (last upload of rank i), once the new uploads have arrived.

        NaN if the gradient of a rank is not finite: then nothing travels.
        """
        if self._broken:
            return torch.full_like(self._sums.total, torch.nan)
        n, ch, coder = self._x.numel(), self._ch, self._coder
        transport = costs.cheapest_upload(len(uploaders), ch.size, coder.payload_bytes(n), 4 * n, 4 * n)
        if transport == "mean":
            self._sums = await average_uploads(self._sums, self.uploads, self._upload, self._x, coder, ch)
        elif transport == "star":
            self._sums = await collect_uploads(self._sums, uploaders, self._upload, coder, ch)
        else:
            self._sums = await broadcast_uploads(self._sums, uploaders, self._upload, coder, ch)
        return self._sums.total / ch.size

    async def commit(self, mean: torch.Tensor) -> bool:
        """Remember the uploads, the length of this step and the counters, if the step is committed."""
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
    """How many entries each tensor has; those without any need no code."""
    return tuple(slot.numel for slot in layout.slots if slot.numel)


def squared_norm(x: torch.Tensor) -> float:
    return float(x.double().square().sum())


def _split(flat: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(cast("tuple[torch.Tensor, ...]", flat.split(lengths)))
