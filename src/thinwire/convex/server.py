"""LAG-PS: a server asks for gradients where the parameters have moved far; only those are computed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.convex.mail import post, take
from thinwire.convex.nodes import Iterate, Node, Places, broken
from thinwire.convex.options import Descent
from thinwire.convex.trace import Iteration
from thinwire.errors import PayloadError
from thinwire.methods.families.lazy import Upload, squared_norm

IDLE, ASK, STOP, BREAK = range(4)
Monitor = Callable[[torch.Tensor], float]


async def serve(
    iterate: Iterate,
    own: Node,
    places: Places,
    *,
    loss: Monitor,
    optimum: float | None,
    done: Callable[[Iteration], bool],
) -> None:
    """The server, which is worker 0 as well. `done` sees every iteration and says whether it was the last.

    An iteration costs the parameters to each worker that is asked, its upload back, and a byte to the rest:
    a worker that hears nothing for long could not tell a quiet server from a dead one.
    """
    others = range(1, iterate.workers)
    over = False
    while not over:
        asked = places.to_ask(iterate.theta, iterate.bound)
        for worker in others:
            await post([_word(ASK if worker in asked else IDLE)], worker, iterate.number)
            if worker in asked:
                await post([iterate.theta], worker, iterate.number)
        bad: list[int] = []
        for worker in asked:
            difference = await _upload(worker, iterate, own)
            if difference is None:
                bad.append(worker)
            else:
                iterate.total = iterate.total + difference
        if bad:
            for worker in others:
                await post([_word(BREAK)], worker, iterate.number + 1)
            raise broken(iterate.number, bad)
        places.asked(asked, iterate.theta)
        over = done(iterate.record(asked, len(asked), loss(iterate.theta), optimum))
        if not over:
            iterate.advance()
    for worker in others:
        await post([_word(STOP)], worker, iterate.number + 1)


async def _upload(worker: int, iterate: Iterate, own: Node) -> torch.Tensor | None:
    """The difference that a worker uploads; None if it is not finite."""
    coder, n = iterate.how.coder, iterate.theta.numel()
    if worker == 0:
        difference = take_own(own, iterate.theta)
    else:
        like = coder.blanks(n, iterate.theta.device)
        difference = coder.decode(await take(like, worker, iterate.number), n)
    return difference if bool(torch.isfinite(difference).all()) else None


def take_own(node: Node, theta: torch.Tensor) -> torch.Tensor:
    mine = node.compute(theta)[1]
    difference = node.how.coder.decode(mine.parts, theta.numel())
    node.uploaded(mine, node.last + difference)
    return difference


async def work(node: Node, how: Descent, start: torch.Tensor) -> None:
    """A worker: idle until it is asked."""
    number = 1
    while True:
        (word,) = await take([_word(IDLE)], 0, number)
        match int(word[0]):
            case 0:  # IDLE
                pass
            case 1:  # ASK
                (theta,) = await take([start], 0, number)
                mine = _checked(node, theta)
                await post(mine.parts, 0, number)
                node.uploaded(mine, node.last + how.coder.decode(mine.parts, theta.numel()))
            case 2:  # STOP
                return
            case 3:  # BREAK
                raise broken(number - 1, [])
            case other:
                raise PayloadError(f"the server says {other}, which this version does not know")
        number += 1


def _checked(node: Node, theta: torch.Tensor) -> Upload:
    if not torch.isfinite(torch.tensor(squared_norm(theta))):
        raise PayloadError("the server sends parameters that are not finite")
    return node.compute(theta)[1]


def _word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.uint8)
