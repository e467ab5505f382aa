"""What the two coroutines await. Whoever drives them decides whether it is a network or a scheduler."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from thinwire.net.costs import GLOO_CONTROL
from thinwire.net.meter import Meter, Tally
from thinwire.server.messages import HEADER_BYTES, Message


@dataclass(slots=True)
class Event:
    """What a server learns: mail on a link, a link that is gone (and why), or that time has passed."""

    what: Literal["mail", "gone", "tick"]
    link: int = 0
    message: Message | None = None
    reason: str = ""


@dataclass(frozen=True)
class Receive:
    """A worker's wish: the next mail of this shard."""

    shard: int


class NextEvent:
    """A server's wish: whatever happens next."""


class _Ask:
    """Hands a wish to whoever runs the coroutine and evaluates to the answer."""

    def __init__(self, wish: object) -> None:
        self._wish = wish

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self._wish)


async def next_event() -> Event:
    return cast(Event, await _Ask(_NEXT))


async def receive(shard: int) -> Message:
    return cast(Message, await _Ask(Receive(shard)))


_NEXT = NextEvent()


class ServerMail(Protocol):
    """How a server answers; sending never waits."""

    def send(self, link: int, message: Message) -> None: ...

    def drop(self, link: int) -> None:
        """Have nothing more to do with this link."""
        ...

    def close(self) -> None:
        """Let nobody join any more."""
        ...


class WorkerMail(Protocol):
    """How a worker writes to a shard."""

    def send(self, shard: int, message: Message) -> None: ...


def count_sent(meter: Meter, message: Message) -> None:
    """Count a mail at its sender, with the control traffic of gloo (see `costs.py`)."""
    length = message.length
    tally = Tally(1, length - HEADER_BYTES, HEADER_BYTES, length + 2 * GLOO_CONTROL, GLOO_CONTROL)
    meter.count(f"send {message.kind.name.lower()}", tally)


def count_received(meter: Meter, message: Message) -> None:
    length = message.length
    tally = Tally(1, 0, 0, GLOO_CONTROL, length + 2 * GLOO_CONTROL)
    meter.count(f"receive {message.kind.name.lower()}", tally)
