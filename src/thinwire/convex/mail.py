"""Mail between a server and its workers: what coroutines ask for, and two ways to carry it."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from thinwire.net import frames
from thinwire.net.costs import GLOO_CONTROL
from thinwire.net.liveness import Liveness
from thinwire.net.meter import Meter, Tally

CONTEXT = 0x6C61
"""Marks this kind of mail in the header of a frame."""


@dataclass(frozen=True)
class Post:
    """Send these bytes to a rank."""

    to: int
    frame: torch.Tensor
    payload_bytes: int


@dataclass(frozen=True)
class Take:
    """The next mail of a rank, of a length that is known beforehand."""

    sender: int
    length: int


class _Ask:
    def __init__(self, wish: Post | Take) -> None:
        self._wish = wish

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self._wish)


Correspondent = Coroutine[Any, Any, None]


async def post(parts: Sequence[torch.Tensor], to: int, number: int) -> None:
    frame = frames.pack(parts, step=number, mark=CONTEXT, ragged=False)
    await _Ask(Post(to, frame, frames.parts_bytes(parts)))


async def take(like: Sequence[torch.Tensor], sender: int, number: int) -> list[torch.Tensor]:
    """The parts that a rank has sent, which have the sizes of `like`; PayloadError if they cannot be that."""
    length = frames.frame_bytes(like, False)
    frame = cast(torch.Tensor, await _Ask(Take(sender, length)))
    return frames.unpack(frame, like, step=number, mark=CONTEXT, ragged=False, source=sender)


class Postman:
    """All correspondents in one process: each runs until it waits for mail that is not there yet."""

    def __init__(self, size: int) -> None:
        self.meters = [Meter() for _ in range(size)]
        self._mail: dict[tuple[int, int], deque[torch.Tensor]] = {}

    def run(self, correspondents: Sequence[Correspondent]) -> None:
        wishes: dict[int, Post | Take] = {}
        try:
            for rank, one in enumerate(correspondents):
                self._send(one, rank, None, wishes)
            while wishes:
                ready = [rank for rank in wishes if self._can(rank, wishes[rank])]
                if not ready:
                    waiting = "; ".join(f"{rank} for {wish}" for rank, wish in wishes.items())
                    raise AssertionError(f"deadlock: everybody waits for mail: {waiting}")
                for rank in ready:
                    answer = self._carry(rank, wishes.pop(rank))
                    self._send(correspondents[rank], rank, answer, wishes)
        finally:
            for one in correspondents:
                one.close()

    def _send(self, one: Correspondent, rank: int, answer: object, wishes: dict[int, Post | Take]) -> None:
        try:
            wishes[rank] = one.send(answer)
        except StopIteration:
            return

    def _can(self, rank: int, wish: Post | Take) -> bool:
        return isinstance(wish, Post) or bool(self._mail.get((wish.sender, rank)))

    def _carry(self, rank: int, wish: Post | Take) -> object:
        count(self.meters[rank], wish)
        if isinstance(wish, Post):
            self._mail.setdefault((rank, wish.to), deque()).append(wish.frame)
            return None
        return self._mail[wish.sender, rank].popleft()


class GroupMail:
    """One correspondent of a process group; a peer that is gone or silent is a `PeerError`."""

    def __init__(self, group: dist.ProcessGroup, meter: Meter) -> None:
        self._group = group
        self._meter = meter
        self._liveness = Liveness(group, group.group_name)

    def run(self, correspondent: Correspondent) -> None:
        answer: object = None
        try:
            while True:
                try:
                    wish = cast("Post | Take", correspondent.send(answer))
                except StopIteration:
                    return
                answer = self._carry(wish)
        finally:
            correspondent.close()

    def _carry(self, wish: Post | Take) -> object:
        try:
            if isinstance(wish, Post):
                dist.send(wish.frame, group=self._group, group_dst=wish.to)
                answer = None
            else:
                answer = torch.empty(wish.length, dtype=torch.uint8)
                dist.recv(answer, group=self._group, group_src=wish.sender)
        except RuntimeError as error:
            what = f"mail to rank {wish.to}" if isinstance(wish, Post) else f"mail of rank {wish.sender}"
            raise self._liveness.diagnose(what, error) from error
        count(self._meter, wish)
        return answer


def count(meter: Meter, wish: Post | Take) -> None:
    """With the control traffic of gloo (see `costs.py`)."""
    if isinstance(wish, Post):
        length = wish.frame.numel()
        overhead = length - wish.payload_bytes
        tally = Tally(1, wish.payload_bytes, overhead, length + 2 * GLOO_CONTROL, GLOO_CONTROL)
        meter.count("post", tally)
    else:
        meter.count("take", Tally(1, 0, 0, GLOO_CONTROL, wish.length + 2 * GLOO_CONTROL))
