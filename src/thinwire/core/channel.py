"""An exchange's only access to the network, and how several exchanges share a round.

An exchange awaits `mean`, `gather`, `broadcast`, `scatter`; it never calls a collective. `together` runs
the exchanges of several tensors concurrently and merges their requests of the same round into one
operation, so a bucket of fifty tensors costs one payload per round, not fifty.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from thinwire.core import agreement
from thinwire.errors import ThinwireError
from thinwire.net import costs, frames
from thinwire.net.rank_info import RankInfo

# A mean becomes part of a gather only while packing and unpacking it costs next to nothing.
LARGEST_FOLDED_BYTES = 256 * 1024
# On NCCL, frames whose lengths may differ are padded to their bound, if that is at most this long. It costs
# less than a round of lengths, which the host has to read before it can size the next operation.
LONGEST_PADDED = 256 * 1024


class _Mean(NamedTuple):
    x: torch.Tensor
    out: torch.Tensor | None
    payload: bool = True
    """Whether its bytes are a method's, not the channel's own."""


@dataclass(frozen=True)
class _Gather:
    parts: tuple[torch.Tensor, ...]
    longest: tuple[int, ...] | None


@dataclass(frozen=True)
class _Broadcast:
    parts: tuple[torch.Tensor, ...]
    src: int


@dataclass(frozen=True)
class _Scatter:
    pieces: tuple[tuple[torch.Tensor, ...], ...]
    longest: tuple[int, ...] | None


@dataclass(frozen=True)
class _Collect:
    parts: tuple[torch.Tensor, ...]
    root: int
    senders: tuple[int, ...]


@dataclass(frozen=True)
class _Commit:
    finite: bool | torch.Tensor


@dataclass(frozen=True)
class _Output:
    """For the views whose memory is free now."""


_Request = _Mean | _Gather | _Broadcast | _Scatter | _Collect | _Commit | _Output


class _Ask:
    """Passes a request to the driver of the coroutine and evaluates to the answer."""

    def __init__(self, request: _Request | frames.Primitive | frames.Deliver) -> None:
        self._request = request

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self._request)


async def ask(op: frames.Primitive) -> Any:
    """Passes a primitive to the driver; part of a program, not of an exchange."""
    return await _Ask(op)


async def free_views() -> Any:
    """Part of an exchange: waits until there are views to write its result to."""
    return await _Ask(_Output())


async def committed_by(program: Coroutine[Any, Any, None]) -> bool:
    """Run a program that asks for one commit; whether it was committed."""
    answer, committed = None, True
    try:
        while True:
            request = program.send(answer)
            answer = await _Ask(request)
            if isinstance(request, frames.Commit):
                committed = bool(answer)
    except StopIteration:
        return committed
    finally:
        program.close()


@dataclass(frozen=True)
class StepContext:
    """The inputs of a step besides the gradient.

    - scale: the loss scale, a factor of all gradients
    - lr: the learning rate that the output will be multiplied by; 1 if it is not known
    - stale: the gradient on the same batch at the parameters of this rank's last upload, if there is one,
      flat and in the layout's order
    - parameters: makes a flat copy of the current parameters, if they are known
    - has_gradient: False if this rank did not compute one, because `wants_gradient` said no: x is then zero
    """

    scale: float = 1.0
    lr: float = 1.0
    stale: torch.Tensor | None = None
    parameters: Callable[[], torch.Tensor] | None = None
    has_gradient: bool = True


class Channel:
    """One exchange's view of the network during one step."""

    def __init__(
        self,
        rank_info: RankInfo,
        *,
        step: int,
        seed: int,
        key: str,
        device: torch.device,
        link: costs.Link,
        context: StepContext | None = None,
        late: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        self.rank = rank_info.rank
        self.link = link
        self.size = rank_info.size
        self.step = step
        self.context = context or StepContext()
        self.finite: bool | None = None
        self.committed: bool | None = None
        self.device = device
        self._seed = seed
        self._key = key
        self._late = late

    async def mean(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The mean of `x` over all ranks, in its own dtype, with equal bits on every rank.

        `x` is left as it is unless `out` is `x`; `x` must have the same shape and dtype on every rank.
        """
        return cast(torch.Tensor, await _Ask(_Mean(x, out)))

    async def gather(
        self, parts: Sequence[torch.Tensor], *, longest: Sequence[int] | None = None
    ) -> list[list[torch.Tensor]]:
        """Every rank's parts, in rank order, each part flat.

        The lengths may differ between ranks only if `longest` is given: the largest length that each part
        can have. A rank that announces more is refused before memory is reserved for it.
        """
        return cast("list[list[torch.Tensor]]", await _Ask(_Gather(tuple(parts), _limits(parts, longest))))

    async def broadcast(self, parts: Sequence[torch.Tensor], src: int) -> list[torch.Tensor]:
        """Rank `src`'s parts, flat. The other ranks pass tensors of the same sizes and dtypes."""
        return cast("list[torch.Tensor]", await _Ask(_Broadcast(tuple(parts), src)))

    async def scatter(
        self, pieces: Sequence[Sequence[torch.Tensor]], *, longest: Sequence[int] | None = None
    ) -> list[list[torch.Tensor]]:
        """Sends pieces[r] to rank r; returns the pieces for this rank, in the order of their senders.

        All pieces for a rank must have the lengths of its own piece for itself, unless `longest` is given, as
        for `gather`.
        """
        if len(pieces) != self.size:
            raise ThinwireError(f"scatter needs one piece per rank: {self.size}, not {len(pieces)}")
        limits = [_limits(piece, longest) for piece in pieces][self.rank]
        request = _Scatter(tuple(tuple(piece) for piece in pieces), limits)
        return cast("list[list[torch.Tensor]]", await _Ask(request))

    async def collect(
        self, parts: Sequence[torch.Tensor], root: int, senders: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        """At `root`, the senders' parts in the order of `senders`, each part flat; an empty list elsewhere.

        `root` and `senders` must be equal on all ranks. Ranks that send nothing, and `root`, pass tensors
        of the same sizes and dtypes.
        """
        request = _Collect(tuple(parts), root, tuple(senders))
        return cast("list[list[torch.Tensor]]", await _Ask(request))

    async def commit(self, finite: bool | torch.Tensor) -> bool:
        """Whether the step is committed; call this once, after the last round. False aborts the step.

        `finite` says whether this exchange saw only finite numbers: a bool, or a boolean tensor with one
        entry, which stays on its device until the flags of all exchanges of the bucket are read together.
        Compute it from data that are equal on all ranks (a mean, gathered scales), so that all ranks agree.
        The answer is True if every exchange of the step, on every rank, passed True. Change no state before
        that, or restore it exactly.
        """
        self.finite, self.committed = cast("tuple[bool, bool]", await _Ask(_Commit(finite)))
        return self.committed

    async def output(self, out: torch.Tensor) -> torch.Tensor:
        """The memory for the result: `out`, or after a wait another tensor, if the result is wanted later.

        For methods with `reads_early`; call it once, after the commit.
        """
        return out if self._late is None else self._late(await free_views())

    def shared_seed(self) -> int:
        """A number that is equal on all ranks and new for every step and tensor."""
        return self._hash("shared")

    def private_seed(self) -> int:
        """A number that is different on every rank, and new for every step and tensor."""
        return self._hash(f"rank {self.rank}")

    def shared_rng(self) -> torch.Generator:
        """A generator that is equal on all ranks, new for every step and tensor.

        It draws on the CPU, so that ranks with different devices draw the same numbers: move them afterwards.
        """
        return torch.Generator().manual_seed(self.shared_seed())

    def private_rng(self) -> torch.Generator:
        """A generator of this rank alone, new for every step and tensor; it draws on the CPU."""
        return torch.Generator().manual_seed(self.private_seed())

    def _hash(self, who: str) -> int:
        text = f"{self._seed}\n{self.step}\n{who}\n{self._key}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _limits(parts: Sequence[torch.Tensor], longest: Sequence[int] | None) -> tuple[int, ...] | None:
    """The limits of these parts, which must hold here already: the other ranks would refuse them."""
    if longest is None:
        return None
    lengths = [part.numel() for part in parts]
    if len(longest) != len(lengths) or any(n > most for n, most in zip(lengths, longest, strict=True)):
        raise ThinwireError(f"parts of {lengths} entries do not fit the limits {list(longest)}")
    return tuple(longest)


def mark_of(text: str) -> int:
    """A 16-bit checksum of what a payload belongs to, to detect ranks that are out of step."""
    return zlib.crc32(text.encode()) & 0xFFFF


Task = Coroutine[_Request, Any, None]
Program = Coroutine[frames.Primitive, Any, None]


async def together(
    tasks: Sequence[Task],
    rank_info: RankInfo,
    *,
    step: int,
    mark: int,
    link: costs.Link,
    note: agreement.Note | None = None,
    pads: bool = False,
    cuts: bool = True,
) -> None:
    """Run exchanges concurrently, with one operation per round and kind of request.

    An exchange that has finished its rounds waits at `commit` for the others, then for the rest of the step.
    With a `note` the first round also confirms that all ranks are at the same point. With `pads` short frames
    of varying length are padded to their bound, instead of a round in which the ranks tell their lengths.
    Without `cuts` no operation is cut into pieces.
    """
    rounds = _Rounds(rank_info, step, mark, link, note, pads, cuts)
    waiting: dict[int, _Request] = {}
    try:
        for index, task in enumerate(tasks):
            _advance(index, task, None, waiting)
        while waiting:
            asking: dict[int, _Request] = {
                i: request for i, request in waiting.items() if not isinstance(request, _Commit | _Output)
            }
            commits = {i: request for i, request in waiting.items() if isinstance(request, _Commit)}
            if asking:
                answers = await rounds.perform(asking)
            elif commits:
                finite = read([request.finite for request in commits.values()])
                committed = cast(bool, await _Ask(frames.Commit(all(finite))))
                answers = {index: (each, committed) for index, each in zip(commits, finite, strict=True)}
            else:
                answers = dict.fromkeys(waiting, await _Ask(frames.Deliver()))
            for index, answer in answers.items():
                _advance(index, tasks[index], answer, waiting)
    finally:
        for task in tasks:
            task.close()


def read(flags: Sequence[bool | torch.Tensor]) -> list[bool]:
    """The flags on the host. Those on a device are read together: the host waits for it once."""
    away = [flag.view(1) for flag in flags if isinstance(flag, torch.Tensor)]
    read = iter(cast("list[bool]", torch.cat(away).tolist()) if away else ())
    return [next(read) if isinstance(flag, torch.Tensor) else flag for flag in flags]


async def tell_all(note: agreement.Note, device: torch.device) -> None:
    """Every rank tells all others where it is: a round of its own. Raises if there is a difference."""
    agreement.check(cast(torch.Tensor, await _Ask(frames.AllGather(note.block(device), 0, setup=True))))


def _advance(index: int, task: Task, answer: object, waiting: dict[int, _Request]) -> None:
    waiting.pop(index, None)
    try:
        waiting[index] = task.send(answer)
    except StopIteration:
        return


class _Rounds:
    """Turns the requests of one round into primitives, one of each kind."""

    def __init__(
        self,
        rank_info: RankInfo,
        step: int,
        mark: int,
        link: costs.Link,
        note: agreement.Note | None,
        pads: bool,
        cuts: bool,
    ) -> None:
        self.rank_info = rank_info
        self.step = step
        # Frames carry the note in their mark, as they carry the step.
        self.mark = mark if note is None else mark ^ (note.digest & 0xFFFF)
        self.link = link
        self.note = note
        self.pads = pads
        self.cuts = cuts

    async def perform(self, asking: dict[int, _Request]) -> dict[int, object]:
        means = {i: r for i, r in asking.items() if isinstance(r, _Mean)}
        note, self.note = self.note, None
        if note is not None and len(asking) == len(means):
            return await self._means_with(note, means)
        if len(asking) == len(means) == 1:  # nothing to sort: the way of every bucket of `dense`
            return await self._means_of_a_dtype(means)
        gathers = {i: r for i, r in asking.items() if isinstance(r, _Gather)}
        scatters = {i: r for i, r in asking.items() if isinstance(r, _Scatter)}
        broadcasts = {i: r for i, r in asking.items() if isinstance(r, _Broadcast)}
        answers: dict[int, object] = {}
        folded: dict[int, _Mean] = {}
        if means and (gathers or scatters) and self._cheap_to_fold(means):
            # What is scattered is gathered afterwards: the means wait for that, and cost no round.
            folded, means = (means if gathers else {}), {}
        answers |= await self._means(means)
        for ragged in (False, True):
            alike = {i: r for i, r in gathers.items() if (r.longest is not None) is ragged}
            if alike:
                answers |= await self._gathers(alike, folded, ragged)
                folded = {}
        answers |= await self._broadcasts(broadcasts)
        for ragged in (False, True):
            alike = {i: r for i, r in scatters.items() if (r.longest is not None) is ragged}
            answers |= await self._scatters(alike, ragged)
        for index, request in asking.items():
            if isinstance(request, _Collect):
                answers[index] = await self._collect(request)
        return answers

    def _cheap_to_fold(self, means: dict[int, _Mean]) -> bool:
        """Whether more bytes in a gather take no longer on the link than a collective of their own."""
        mean_bytes = sum(frames.parts_bytes([mean.x]) for mean in means.values())
        if mean_bytes > LARGEST_FOLDED_BYTES:
            return False
        size = self.rank_info.size
        alone, inside = costs.all_reduce(size, mean_bytes), costs.all_gather(size, mean_bytes)
        return self.link.transfer_seconds(inside) <= self.link.seconds_for(alone) + self.link.operation

    async def _means_with(self, note: agreement.Note, means: dict[int, _Mean]) -> dict[int, object]:
        """The means, and in the same operation the confirmation that all ranks are at the same point."""
        device = next(iter(means.values())).x.device
        answers = await self._means(means | {-1: _Mean(note.bits(device), None, payload=False)})
        if not agreement.same_bits(cast(torch.Tensor, answers.pop(-1)), self.rank_info):
            await tell_all(note, device)
        return answers

    async def _means(self, means: dict[int, _Mean]) -> dict[int, object]:
        answers: dict[int, object] = {}
        by_dtype: dict[torch.dtype, dict[int, _Mean]] = {}
        for index, request in means.items():
            by_dtype.setdefault(request.x.dtype, {})[index] = request
        for same in by_dtype.values():
            answers |= await self._means_of_a_dtype(same)
        return answers

    async def _means_of_a_dtype(self, means: dict[int, _Mean]) -> dict[int, object]:
        requests = list(means.values())
        weight = 1.0 / self.rank_info.size
        if len(requests) == 1:
            (request,) = requests
            target = torch.empty_like(request.x) if request.out is None else request.out
            # Divided before the sum, as DDP does: a sum of halves overflows less easily.
            torch.mul(request.x, weight, out=target)
            await self._all_reduce(target if target.dim() == 1 else target.view(-1), requests)
            return dict.fromkeys(means, target)
        flat = torch.cat([request.x.reshape(-1) for request in requests]).mul_(weight)
        await self._all_reduce(flat, requests)
        answers: dict[int, object] = {}
        position = 0
        for index, request in means.items():
            piece = flat[position : position + request.x.numel()].view(request.x.shape)
            position += request.x.numel()
            answers[index] = piece if request.out is None else request.out.copy_(piece)
        return answers

    async def _all_reduce(self, flat: torch.Tensor, requests: Sequence[_Mean]) -> None:
        if flat.numel():
            numbers = sum(request.x.numel() for request in requests if request.payload)
            await _Ask(frames.AllReduce(flat, numbers * flat.element_size()))

    async def _gathers(
        self, gathers: dict[int, _Gather], folded: dict[int, _Mean], ragged: bool
    ) -> dict[int, object]:
        parts = [part for request in gathers.values() for part in request.parts]
        parts += [request.x for request in folded.values()]
        longest: list[int] | None = None
        if ragged:
            longest = [most for request in gathers.values() for most in request.longest or ()]
            longest += [request.x.numel() for request in folded.values()]
        limit = None if longest is None else frames.longest_frame(parts, longest)
        frame = self._pack(parts, limit)
        gathered = await self._gather_frames(frame, frames.parts_bytes(parts), limit)
        received = self._unpack(gathered, parts, longest, range(self.rank_info.size))
        answers: dict[int, object] = {}
        position = 0
        for index, request in gathers.items():
            end = position + len(request.parts)
            answers[index] = [theirs[position:end] for theirs in received]
            position = end
        weight = 1.0 / self.rank_info.size
        for index, request in folded.items():
            for rank, theirs in enumerate(received):
                if theirs[position].numel() != request.x.numel():
                    raise frames.PayloadError(f"rank {rank} sent a part of another length than this rank's")
            total = received[0][position] * weight
            for theirs in received[1:]:
                total += theirs[position] * weight
            mean = total.view(request.x.shape)
            answers[index] = mean if request.out is None else request.out.copy_(mean)
            position += 1
        return answers

    def _pack(self, parts: Sequence[torch.Tensor], limit: int | None) -> torch.Tensor:
        """A frame; `limit` is the length of the longest, if lengths may differ."""
        if limit is None or not self._is_padded(limit):
            return frames.pack(parts, step=self.step, mark=self.mark, ragged=limit is not None)
        return frames.pack(parts, step=self.step, mark=self.mark, ragged=True, length=limit)

    def _is_padded(self, limit: int) -> bool:
        """Whether all frames get this length; every rank knows it."""
        return self.pads and limit <= LONGEST_PADDED

    def _unpack(
        self,
        arrived: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        longest: Sequence[int] | None,
        sources: Sequence[int],
    ) -> list[list[torch.Tensor]]:
        """The parts of these frames, which came from these ranks."""
        heads = frames.read_heads(arrived, len(parts), longest is not None)
        padded = longest is not None and self._is_padded(frames.longest_frame(parts, longest))
        return [
            frames.unpack(
                frame,
                parts,
                step=self.step,
                mark=self.mark,
                longest=longest,
                source=source,
                own=source == self.rank_info.rank,
                head=head,
                padded=padded,
            )
            for frame, source, head in zip(arrived, sources, heads, strict=True)
        ]

    async def _gather_frames(
        self, frame: torch.Tensor, payload: int, limit: int | None
    ) -> list[torch.Tensor]:
        if limit is None or self._is_padded(limit):
            return list(await self._all_gather(frame, payload))
        sizes = await self._lengths(frame, limit)
        transport = costs.cheapest_ragged_gather(sizes, self.link)
        if transport == "direct":
            blocks = (frame,) * self.rank_info.size
            return await self._all_to_all(blocks, sizes, payload, sum(sizes))
        if transport == "broadcast":
            received: list[torch.Tensor] = []
            for src, length in enumerate(sizes):
                mine = src == self.rank_info.rank
                block = frame.clone() if mine else frame.new_empty(length)
                await _Ask(frames.Broadcast(block, src, payload if mine else 0))
                received.append(block)
            return received
        padded = frame.new_zeros(max(sizes))
        padded[: frame.numel()] = frame
        gathered = await self._all_gather(padded, payload)
        return [row[:length] for row, length in zip(gathered, sizes, strict=True)]

    async def _all_gather(self, block: torch.Tensor, payload: int) -> torch.Tensor:
        """In one operation, or in several of shorter pieces where that is faster on the link."""
        count = costs.slices(block.numel(), self.link) if self.cuts else 1
        if count == 1:
            return cast(torch.Tensor, await _Ask(frames.AllGather(block, payload)))
        gathered = block.new_empty((self.rank_info.size, block.numel()))
        for piece, share in zip(_pieces(block.numel(), count), _shares(payload, count), strict=True):
            gathered[:, piece] = await _Ask(frames.AllGather(block[piece], share))
        return gathered

    async def _all_to_all(
        self, blocks: Sequence[torch.Tensor], receive: Sequence[int], payload: int, data_bytes: int
    ) -> list[torch.Tensor]:
        """The same for blocks to every rank. `data_bytes`, equal on all ranks, are about those of a rank."""
        count = costs.slices(data_bytes, self.link) if self.cuts else 1
        if count == 1:
            arrived = await _Ask(frames.AllToAll(tuple(blocks), tuple(receive), payload))
            return cast("list[torch.Tensor]", arrived)
        complete = [blocks[0].new_empty(length) for length in receive]
        # A frame that goes to all ranks stays one tensor in every piece, by which the meter knows it.
        outgoing = {id(block): [block[piece] for piece in _pieces(block.numel(), count)] for block in blocks}
        incoming = [[whole[piece] for piece in _pieces(whole.numel(), count)] for whole in complete]
        for number, share in enumerate(_shares(payload, count)):
            parts = tuple(outgoing[id(block)][number] for block in blocks)
            rooms = [pieces[number] for pieces in incoming]
            arrived = await _Ask(frames.AllToAll(parts, tuple(room.numel() for room in rooms), share))
            for room, part in zip(rooms, arrived, strict=True):
                room.copy_(part)
        return complete

    async def _lengths(self, frame: torch.Tensor, limit: int) -> list[int]:
        """The frame lengths of all ranks: a round of its own, two, four or eight bytes per rank."""
        mine = _written([frame.numel()], limit).to(frame.device)
        gathered = cast(torch.Tensor, await _Ask(frames.AllGather(mine, 0)))
        return _lengths_in(gathered.flatten(), limit)

    async def _broadcasts(self, broadcasts: dict[int, _Broadcast]) -> dict[int, object]:
        answers: dict[int, object] = {}
        for src in sorted({request.src for request in broadcasts.values()}):
            alike = {i: r for i, r in broadcasts.items() if r.src == src}
            parts = [part for request in alike.values() for part in request.parts]
            mine = src == self.rank_info.rank
            if mine:
                frame = frames.pack(parts, step=self.step, mark=self.mark, ragged=False)
            else:
                length = frames.frame_bytes(parts, False)
                frame = torch.empty(length, dtype=torch.uint8, device=parts[0].device)
            await _Ask(frames.Broadcast(frame, src, frames.parts_bytes(parts) if mine else 0))
            (received,) = self._unpack([frame], parts, None, [src])
            for index, request in alike.items():
                answers[index] = received[: len(request.parts)]
                received = received[len(request.parts) :]
        return answers

    async def _scatters(self, scatters: dict[int, _Scatter], ragged: bool) -> dict[int, object]:
        if not scatters:
            return {}
        outgoing = [
            [part for request in scatters.values() for part in request.pieces[rank]]
            for rank in range(self.rank_info.size)
        ]
        mine = outgoing[self.rank_info.rank]
        longest: list[int] | None = None
        limit: int | None = None
        if ragged:
            longest = [most for request in scatters.values() for most in request.longest or ()]
            limit = frames.longest_frame(mine, longest)
        outgoing_frames = tuple(self._pack(parts, limit) for parts in outgoing)
        lengths = [outgoing_frames[self.rank_info.rank].numel()] * self.rank_info.size
        if limit is not None and not self._is_padded(limit):
            lengths = await self._lengths_for_me(outgoing_frames, limit)
        payload = sum(frames.parts_bytes(parts) for parts in outgoing)
        # Without a limit all ranks have frames of these lengths; else a rank knows only its own.
        data_bytes = sum(frame.numel() for frame in outgoing_frames) if limit is None else 0
        arrived = await self._all_to_all(outgoing_frames, lengths, payload, data_bytes)
        received = self._unpack(arrived, mine, longest, range(self.rank_info.size))
        answers: dict[int, object] = {}
        position = 0
        for index, request in scatters.items():
            end = position + len(request.pieces[self.rank_info.rank])
            answers[index] = [theirs[position:end] for theirs in received]
            position = end
        return answers

    async def _collect(self, request: _Collect) -> list[list[torch.Tensor]]:
        """An all-to-all in which only `root` receives; every rank knows all lengths beforehand."""
        me, parts = self.rank_info.rank, request.parts
        senders = [rank for rank in request.senders if rank != request.root]
        sends = me in senders
        blocks = [parts[0].new_empty(0, dtype=torch.uint8)] * self.rank_info.size
        if sends:
            blocks[request.root] = frames.pack(parts, step=self.step, mark=self.mark, ragged=False)
        here, length = me == request.root, frames.frame_bytes(parts, ragged=False)
        lengths = [length if here and rank in senders else 0 for rank in range(self.rank_info.size)]
        payload = frames.parts_bytes(parts) if sends else 0
        arrived = cast(
            "list[torch.Tensor]", await _Ask(frames.AllToAll(tuple(blocks), tuple(lengths), payload))
        )
        return self._unpack([arrived[rank] for rank in senders], parts, None, senders) if here else []

    async def _lengths_for_me(self, outgoing: Sequence[torch.Tensor], limit: int) -> list[int]:
        """The lengths of the frames that the ranks have for this one: two to eight bytes to every other."""
        written = _written([frame.numel() for frame in outgoing], limit).to(outgoing[0].device)
        size = self.rank_info.size
        width = written.numel() // size
        blocks = torch.split(written, width)
        arrived = cast("list[torch.Tensor]", await _Ask(frames.AllToAll(blocks, (width,) * size, 0)))
        return _lengths_in(torch.cat(arrived), limit)


def _pieces(length: int, count: int) -> list[slice]:
    """So many pieces of a block, cut at multiples of 8 bytes; those of a short block may be empty."""
    cuts = [length * n // (8 * count) * 8 for n in range(count)]
    return [slice(begin, end) for begin, end in pairwise([*cuts, length])]


def _shares(payload: int, count: int) -> list[int]:
    """The bytes of a payload that count for each of so many pieces."""
    return [payload * (n + 1) // count - payload * n // count for n in range(count)]


def _width(limit: int) -> str:
    """The narrowest whole number, for `struct`, that holds lengths up to this limit, which all ranks know."""
    return "H" if limit < 2**16 else "I" if limit < 2**32 else "Q"


def _written(lengths: Sequence[int], limit: int) -> torch.Tensor:
    return torch.frombuffer(
        bytearray(struct.pack(f"<{len(lengths)}{_width(limit)}", *lengths)), dtype=torch.uint8
    )


def _lengths_in(written: torch.Tensor, limit: int) -> list[int]:
    """The lengths that the ranks announce, checked before memory is reserved for them."""
    width = _width(limit)
    count = written.numel() // struct.calcsize(f"<{width}")
    lengths = list(struct.unpack(f"<{count}{width}", frames.to_bytes(written)))
    _check_lengths(lengths, limit)
    return lengths


def _check_lengths(lengths: Sequence[int], limit: int) -> None:
    for rank, length in enumerate(lengths):
        if not frames.HEADER_BYTES <= length <= limit or length % 8:
            raise frames.PayloadError(
                f"rank {rank} announces a payload of {length} bytes; this method sends at most {limit}, in "
                "multiples of 8"
            )
