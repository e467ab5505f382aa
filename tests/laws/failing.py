"""A driver whose operations fail."""

from collections.abc import Sequence

import pytest

from thinwire.core.channel import Program
from thinwire.drivers import Lockstep
from thinwire.net import frames


class Failing(Lockstep):
    """Its operation number `at` of a step fails on all ranks.

    If the programs are told, nothing has been done. Otherwise the memory of the operation has any contents.
    """

    at: int | None = None
    told = True
    refuses = False
    """Whether commits are answered with False."""
    operations = 0

    def run(self, programs: Sequence[Program]) -> bool:
        self._programs, self.operations = programs, 0
        return super().run(programs) and not self.refuses

    def perform(
        self, ops: Sequence[frames.Operation | frames.Commit], ranks: Sequence[int], *, inside: bool = False
    ) -> Sequence[object]:
        self.operations += 1
        if self.operations - 1 == self.at:
            self._fail(ops)
        answers = super().perform(ops, ranks, inside=inside)
        return [False] * len(ops) if self.refuses and isinstance(ops[0], frames.Commit) else answers

    def _fail(self, ops: Sequence[frames.Operation | frames.Commit]) -> None:
        error = ConnectionError("a test")
        if self.told:
            for program in self._programs:
                with pytest.raises(ConnectionError, match="a test"):
                    program.throw(error)
        else:
            for op in ops:
                if isinstance(op, frames.AllReduce):
                    op.tensor.fill_(99)
                elif isinstance(op, frames.Broadcast):
                    op.block.fill_(99)
        raise error
