"""Runs a coroutine to its end in the calling thread."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.core.channel import Program
from thinwire.net import frames


def drive_until_commit(
    program: Program, execute: Callable[[frames.Primitive], object]
) -> frames.Commit | None:
    """Run until the program asks for a commit, or ends (None)."""
    try:
        request = program.send(None)
        while not isinstance(request, frames.Commit):
            try:
                answer = execute(request)
            except BaseException as error:
                request = program.throw(error)
            else:
                request = program.send(answer)
    except StopIteration:
        return None
    except BaseException:
        program.close()
        raise
    return request


def finish(program: Program, answer: object) -> None:
    """Give the last answer (of the commit, or of the only operation); the program may not ask again."""
    try:
        request = program.send(answer)
    except StopIteration:
        return
    program.close()
    raise AssertionError(f"an exchange asked for {type(request).__name__} after its last answer")


class Blocking:
    """The driver for a caller that waits for the result."""

    def __init__(self, execute: Callable[[frames.Primitive], object]) -> None:
        self._execute = execute

    def run(self, program: Program) -> bool:
        """True if every number was finite, so that the step was committed."""
        commit_request = drive_until_commit(program, self._execute)
        if commit_request is None:
            return True
        finish(program, commit_request.finite)
        return commit_request.finite
