"""Delayed steps without copies: gradients are read where they are, and means written there a step later."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Sequence
from typing import Any, cast

from thinwire.core.channel import Program
from thinwire.core.routing import View
from thinwire.errors import ThinwireError
from thinwire.net import frames


class Begun(Coroutine[frames.Primitive, Any, None]):
    """A program whose first part has run: it has read its gradients.

    A driver goes on with it and sees its end after the commit. The results are written by `deliver`, whenever
    there is memory for them: in a delayed step into the gradients of the next step, once those are read.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._first: frames.Primitive | None = program.send(None)

    def send(self, answer: Any, /) -> frames.Primitive:
        """As a coroutine does; the first call answers with what the program asked for when it began."""
        request, self._first = self._first, None
        if request is None:
            request = self._program.send(answer)
        if isinstance(cast(object, request), frames.Deliver):
            raise StopIteration
        return request

    def throw(self, *error: Any) -> frames.Primitive:
        return self._program.throw(*error)

    def deliver(self, views: Sequence[View]) -> None:
        """Write the results into the outputs of these views, which have the layouts of the program's own."""
        try:
            self._program.send(views)
        except StopIteration:
            return
        raise ThinwireError("a program asked for more after its end")

    def close(self) -> None:
        self._program.close()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._program.__await__()
