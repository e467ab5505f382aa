"""LAG-PS: a server asks for gradients where the parameters have moved far; only those are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

import torch

from thinwire.convex.nodes import Iterate, Node, not_finite
from thinwire.convex.options import Iteration
from thinwire.errors import PayloadError
from thinwire.net import frames
from thinwire.net.transport import Connection

MARK = 0x6C61
"""Marks these messages in the header of a frame."""


class Command(IntEnum):
    """What the server tells a worker in every iteration, in one byte."""

    IDLE = 0
    COMPUTE = 1
    STOP = 2
    FAIL = 3


async def serve(
    iterate: Iterate,
    own: Node,
    connections: Mapping[int, Connection],
    *,
    loss: Callable[[torch.Tensor], float],
    optimum: float | None,
    done: Callable[[Iteration], bool],
) -> None:
    """The server, which is worker 0 as well. `done` sees every iteration and says whether it was the last.

    An iteration costs the parameters to each worker that is asked, its upload back, and one byte to the
    others: a worker that hears nothing for long could not tell a quiet server from a dead one.
    """

    coder, over = iterate.how.coder, False
    while not over:
        theta, n = iterate.theta, iterate.theta.numel()
        asked = iterate.to_ask()
        for worker in connections:
            what = Command.COMPUTE if worker in asked else Command.IDLE
            _send(connections[worker], [_byte(what)], iterate.number)
            if worker in asked:
                _send(connections[worker], [theta], iterate.number)
        failed: list[int] = []
        for worker in asked:
            if worker == 0:
                difference = own.upload(own.compute(theta))
            else:
                like = coder.blanks(n, theta.device)
                parts = await _receive(connections[worker], like, iterate.number, worker)
                difference = coder.decode(parts, n)
            if bool(torch.isfinite(difference).all()):
                iterate.total = iterate.total + difference
            else:
                failed.append(worker)
        if failed:
            _send_all(connections, Command.FAIL, iterate.number + 1)
            raise not_finite(iterate.number, failed)
        over = done(iterate.record(asked, len(asked), loss(theta), optimum))
        if not over:
            iterate.advance()
    _send_all(connections, Command.STOP, iterate.number + 1)


async def work(node: Node, start: torch.Tensor, server: Connection) -> None:
    """A worker: idle until it is asked for its gradient."""
    number = 1
    while True:
        (command,) = await _receive(server, [_byte(Command.IDLE)], number, 0)
        match int(command[0]):
            case Command.IDLE:
                pass
            case Command.COMPUTE:
                (theta,) = await _receive(server, [start], number, 0)
                if not bool(torch.isfinite(theta).all()):
                    raise PayloadError("the server sends parameters that are not finite")
                mine = node.compute(theta)
                _send(server, mine.parts, number)
                node.upload(mine)
            case Command.STOP:
                return
            case Command.FAIL:
                raise not_finite(number - 1, [])
            case other:
                raise PayloadError(f"the server sends the command {other}, which this version does not know")
        number += 1


def _byte(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.uint8)


def _send_all(connections: Mapping[int, Connection], command: Command, number: int) -> None:
    for connection in connections.values():
        _send(connection, [_byte(command)], number)


def _send(connection: Connection, parts: Sequence[torch.Tensor], number: int) -> None:
    frame = frames.pack(parts, step=number, mark=MARK, ragged=False)
    connection.send(frame, frames.parts_bytes(parts))


async def _receive(
    connection: Connection, like: Sequence[torch.Tensor], number: int, source: int
) -> list[torch.Tensor]:
    """Parts with the sizes of `like`; PayloadError if the bytes cannot be that."""
    frame = (await connection.receive(frames.frame_bytes(like, False))).clone()
    connection.count_received(frame.numel())
    return frames.unpack(frame, like, step=number, mark=MARK, longest=None, source=source)
