"""Lazy aggregation: flags first, then only the uploads travel, and everybody keeps the same sum of them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from thinwire import kernels
from thinwire.core.channel import Channel
from thinwire.core.exchange import Exchange, State, momentum, own, replicated
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Traits
from thinwire.errors import PayloadError
from thinwire.net import costs

# What a rank says before anything else, in one byte.
SKIP, UPLOAD, FRESH, BROKEN = range(4)
UNCODED = 32
"""Bits an entry of an upload that is not quantised: a float32."""
EXACT = 64
"""The same as a float64: nothing is lost on the way."""
WIDTHS = (1, 2, 4, 8, UNCODED)


@dataclass(frozen=True)
class Upload:
    """What a rank would send: the difference to its last upload, as everybody would decode it.

    `size` and `error` are squared norms: of the difference as decoded, and of what its code loses. Not
    finite if the gradient is not.
    """

    parts: list[torch.Tensor]
    size: float
    error: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.size + self.error)


@dataclass(frozen=True)
class Coder:
    """Differences as floats, or on LAQ's grid of a few bits an entry, with a radius for each tensor.

    The difference is taken to what the others have of this rank, so what a code or a rounding loses is
    part of the next difference: nothing piles up. An entry's error is at most its own tensor's radius over
    2^b - 1, and a tensor that has not changed is decoded as 0.

    Args:
        bits: of an entry.
        tensors: how many entries each tensor has; None if the whole is one. Each one's codes begin with a
            byte of their own.
    """

    bits: int
    tensors: tuple[int, ...] | None = None

    def encode(self, x: torch.Tensor, last: torch.Tensor) -> Upload:
        exact = x.double() - last
        difference = exact if self.bits == EXACT else exact.float()
        if self.bits in (UNCODED, EXACT):
            return Upload([difference], squared_norm(difference), 0.0)
        cuts = self._cuts(difference.numel())
        nothing = torch.zeros_like(difference)
        codes: list[torch.Tensor] = []
        radii: list[float] = []
        size = error = 0.0
        for piece, zeros in zip(cut(difference, cuts), cut(nothing, cuts), strict=True):
            packed, radius = kernels.laq_quantise(piece, zeros, self.bits)
            moved, lost = math.nan, math.nan
            if math.isfinite(radius):
                moved, lost = kernels.laq_norms(piece, zeros, packed, radius, self.bits)
            codes.append(packed)
            radii.append(radius)
            size += moved
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
        for piece, codes, radius in zip(cut(difference, cuts), cut(packed, lengths), numbers, strict=True):
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


async def ask_all(flag: int, ch: Channel, device: torch.device) -> list[int]:
    """Everybody's flag, in rank order: one byte a rank."""
    mine = torch.tensor([flag], dtype=torch.uint8, device=device)
    return checked([int(theirs[0]) for (theirs,) in await ch.gather([mine])])


def checked(flags: list[int]) -> list[int]:
    for rank, value in enumerate(flags):
        if value > BROKEN:
            raise PayloadError(f"rank {rank} sends the flag {value}, which this version does not know")
    return flags


class Sum:
    """The sum of all ranks' last uploads, and this rank's own: as they will be once the step is settled.

    Both in float64, so that adding float32 differences to both loses nothing to speak of, and `total` stays
    the sum of the ranks' `last` however many steps are made.
    """

    def __init__(
        self, last: torch.Tensor, total: torch.Tensor, coder: Coder, *, only_broadcasts: bool = False
    ) -> None:
        self.last: torch.Tensor = last
        self.total: torch.Tensor = total
        self.coder = coder
        self.only_broadcasts = only_broadcasts

    def transport(self, uploaders: int, size: int) -> str:
        if self.only_broadcasts:
            return "broadcast" if uploaders else "nothing"
        n = self.last.numel()
        return costs.cheapest_upload(uploaders, size, self.coder.payload_bytes(n), 4 * n, 4 * n)

    async def add(self, uploaders: Sequence[int], mine: Upload, x: torch.Tensor, ch: Channel) -> None:
        """Bring the uploads of these ranks to everybody. The tensors given at first stay as they are."""
        match self.transport(len(uploaders), ch.size):
            case "broadcast":
                await self._broadcasts(uploaders, mine, ch)
            case "star":
                await self._star(uploaders, mine, ch)
            case "mean":
                await self._mean(ch.rank in uploaders, mine, x, ch)
            case _:
                pass

    async def _broadcasts(self, uploaders: Sequence[int], mine: Upload, ch: Channel) -> None:
        n, device = self.last.numel(), self.last.device
        self.total = self.total.clone()
        for rank in uploaders:
            parts = mine.parts if rank == ch.rank else self.coder.blanks(n, device)
            difference = self.coder.decode(await ch.broadcast(parts, rank), n)
            self.total += difference
            if rank == ch.rank:
                self.last = self.last + difference

    async def _star(self, uploaders: Sequence[int], mine: Upload, ch: Channel) -> None:
        n, device = self.last.numel(), self.last.device
        root, *others = uploaders
        uploads = ch.rank in uploaders
        parts = mine.parts if uploads else self.coder.blanks(n, device)
        received = await ch.collect(parts, root, others)
        summed = torch.zeros(n, dtype=torch.float64, device=device)
        for theirs in ([mine.parts] if ch.rank == root else []) + received:
            summed += self.coder.decode(theirs, n)
        (rounded,) = await ch.broadcast([summed.float()], root)
        self.total = self.total + rounded
        if uploads:
            self.last = self.last + self.coder.decode(mine.parts, n)
        if ch.rank == root:  # what the sum lost in float32 is made good by the root's next difference
            self.last += rounded - summed

    async def _mean(self, uploads: bool, mine: Upload, x: torch.Tensor, ch: Channel) -> None:
        """Everybody's last upload, not the differences: the sum is new, so old rounding is gone as well."""
        n = self.last.numel()
        if uploads and self.coder.bits == UNCODED:
            last = x.float()
        else:
            last = (self.last + self.coder.decode(mine.parts, n) if uploads else self.last).float()
        self.total = (await ch.mean(last)).double() * ch.size
        self.last = last.double()


@dataclass
class LazyState(State):
    """In the order of use.

    last: this rank's last upload, as everybody has it; total: the sum of all ranks' `last`; moved: how far
    the parameters have gone since, for the rule "ps"; anchor: the parameters then, for same-batch rules.
    steps: squared lengths of the last steps, newest first; ranks: how many had a part in `total`.
    counts: steps since the last upload, what that upload's code lost, the smoothness seen so far, uploads.
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


@dataclass
class Counts:
    """This rank's counters as numbers; squared norms are free of the loss scale."""

    clock: int
    error: float
    smoothness: float
    uploads: int

    @staticmethod
    def of(state: LazyState) -> Counts:
        return Counts.from_tensor(state.counts)

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> Counts:
        clock, error, smoothness, uploads = cast("list[float]", tensor.tolist())
        return Counts(int(clock), error, smoothness, int(uploads))

    def to(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.tensor([self.clock, self.error, self.smoothness, self.uploads]))


@dataclass(frozen=True)
class Lazy(Exchange):
    """Base of LAG, LAQ, SLAQ and LASG: out = (1/W) sum_i (what rank i last uploaded).

    Subclasses say what a rank compares with the bound R = xi sum_d |out_{k-d}|^2 over the last steps. In the
    papers R = (1/(a W)^2) sum_d xi |theta_{k+1-d} - theta_{k-d}|^2 for sums of gradients and the step size
    a; with theta_{k+1} = theta_k - a W out_k that is the same. Where the optimizer is known, a changing
    learning rate is taken into account.
    """

    # -- what subclasses say -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def upload_bits(self) -> int: ...

    @property
    @abstractmethod
    def bound(self) -> tuple[int, float]:
        """How many past steps count, and the weight of each (xi)."""

    @property
    def longest_silence(self) -> int | None:
        return None

    @property
    def keeps_anchor(self) -> bool:
        return False

    @property
    def keeps_movement(self) -> bool:
        return False

    @abstractmethod
    def judged(self, mine: Upload, x: torch.Tensor, state: LazyState, ch: Channel) -> float:
        """The squared norm that is compared; infinite if this rank must upload."""

    def allowed(self, bound: float, error: float, last_error: float) -> float:
        """The largest squared norm that may be skipped."""
        del error, last_error
        return bound

    # -- the exchange ------------------------------------------------------------------------------------

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

    def init(self, layout: Layout) -> LazyState:
        n, device = layout.numel, layout.device

        def zeros(count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return LazyState(
            last=zeros(n),
            total=zeros(n),
            moved=zeros(n if self.keeps_movement else 0),
            steps=zeros(self.bound[0]),
            ranks=zeros(1, torch.int64),
            anchor=zeros(n if self.keeps_anchor else 0, torch.float32),
            counts=zeros(4),
            lengths=entries(layout),
        )

    async def run(self, x: torch.Tensor, out: torch.Tensor, state: LazyState, ch: Channel) -> None:
        coder, counts = Coder(self.upload_bits, state.lengths), Counts.of(state)
        fresh = int(state.ranks) != ch.size
        nothing = torch.zeros_like(state.last)
        mine = coder.encode(x, nothing if fresh else state.last)
        flags = await ask_all(self._flag(fresh, mine, x, state, counts, ch), ch, x.device)
        if BROKEN in flags:
            await ch.commit(False)
            return
        uploaders = [rank for rank, flag in enumerate(flags) if flag != SKIP]
        if FRESH in flags:  # the first step, or a group of another size: all begin anew
            mine = mine if fresh else coder.encode(x, nothing)
            uploaders = list(range(ch.size))
            state_sum = Sum(nothing, nothing, coder)
        else:
            state_sum = Sum(state.last, state.total, coder)
        await state_sum.add(uploaders, mine, x, ch)
        mean = state_sum.total / ch.size
        squared = squared_norm(mean)
        if await ch.commit(math.isfinite(squared)):
            state.last.copy_(state_sum.last)
            state.total.copy_(state_sum.total)
            state.ranks.fill_(ch.size)
            self._count(state, counts, mine if ch.rank in uploaders else None, FRESH in flags, ch)
            state.steps.copy_(state.steps.roll(1))
            state.steps[0] = squared * (ch.context.lr / ch.context.scale) ** 2
            if self.keeps_movement:
                state.moved += mean * ch.context.lr
        out.copy_(mean)

    def _flag(
        self, fresh: bool, mine: Upload, x: torch.Tensor, state: LazyState, counts: Counts, ch: Channel
    ) -> int:
        if not mine.finite:
            return BROKEN
        if fresh:
            return FRESH
        if self.longest_silence is not None and counts.clock >= self.longest_silence:
            return UPLOAD
        # A learning rate of 0 makes no step, and nothing is known of the next one.
        recent = self.bound[1] * float(state.steps.sum()) / ch.context.lr**2 if ch.context.lr else 0.0
        unit = ch.context.scale**2
        allowed = self.allowed(recent, mine.error / unit, counts.error)
        # A bound of 0 (xi = 0) skips nothing, not even a difference of 0: that is plain gradient descent.
        return SKIP if allowed > 0 and self.judged(mine, x, state, ch) / unit <= allowed else UPLOAD

    def _count(self, state: LazyState, counts: Counts, sent: Upload | None, first: bool, ch: Channel) -> None:
        if first:
            counts = Counts(0, 0.0, 0.0, counts.uploads)
        counts.clock += 1
        if sent is not None:
            counts.clock = 0
            counts.uploads += 1
            counts.error = sent.error / ch.context.scale**2
            if self.keeps_movement:
                way = squared_norm(state.moved)
                if way and not first:
                    counts.smoothness = max(counts.smoothness, math.sqrt(sent.size / way))
                state.moved.zero_()
            if self.keeps_anchor and ch.context.parameters is not None:
                state.anchor.copy_(ch.context.parameters())
        counts.to(state.counts)

    def stale_parameters(self, state: LazyState) -> torch.Tensor | None:
        return state.anchor if self.keeps_anchor and int(state.ranks) else None

    def payload_bytes(self, layout: Layout, size: int) -> int:
        """The most: when all upload, as in the first step. A rank that skips hands over its flag."""
        coder, n = Coder(self.upload_bits, entries(layout)), layout.numel
        coded = coder.payload_bytes(n)
        transport = costs.cheapest_upload(size, size, coded, 4 * n, 4 * n)
        return 1 + {"broadcast": coded, "star": max(coded, 4 * n), "mean": 4 * n}[transport]


def entries(layout: Layout) -> tuple[int, ...]:
    """How many each tensor has; those without any need no code."""
    return tuple(slot.numel for slot in layout.slots if slot.numel)


def cut(flat: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Views of these lengths, one after the other."""
    return list(cast("tuple[torch.Tensor, ...]", flat.split(lengths)))


def squared_norm(x: torch.Tensor) -> float:
    return float(x.double().square().sum())
