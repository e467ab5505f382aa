"""For methods that ask for one mean and remember nothing: no thread of ours, so nothing to hand over.

The hook itself issues the operation, and the program ends where the answer arrives. That is safe because no
second operation follows: a collective issued from a future's callback is what lanes are there to avoid
(see `lanes.py`). What it saves is two changes of thread per bucket, which on small buckets cost more than
everything else thinwire does.
"""

from __future__ import annotations

from thinwire import wire
from thinwire.drivers.blocking import finish
from thinwire.drivers.lanes import Job
from thinwire.drivers.process_group import ProcessGroupWire


class Direct:
    """Issues each program's only operation in the caller's thread; many can be under way at once."""

    def __init__(self, wire_: ProcessGroupWire) -> None:
        self._wire = wire_
        self._broken: BaseException | None = None

    def submit(self, number: int, job: Job) -> None:
        """Start a program. All go through one group, in the order of the calls."""
        del number
        job.step.enter()
        try:
            if self._broken is not None:
                raise self._broken
            op = job.program.send(None)
            if not isinstance(op, wire.AllReduce):
                raise AssertionError(f"a memoryless exchange asked for {type(op).__name__}, not for a mean")
            self._wire.issue(op, lambda error: self._arrived(job, op, error))
        except StopIteration:
            job.step.leave()
            job.done(None)
        except BaseException as error:  # handed to the waiting training loop, whatever it is
            self._fail(job, error)

    def close(self) -> None:
        """Nothing to end: there is no thread."""

    def _arrived(self, job: Job, op: wire.AllReduce, error: BaseException | None) -> None:
        try:
            if error is not None:
                raise self._broken or error
            finish(job.program, op.tensor)
        except BaseException as raised:
            self._fail(job, raised)
        else:
            job.step.leave()
            job.done(None)

    def _fail(self, job: Job, error: BaseException) -> None:
        self._broken = self._broken or error
        job.program.close()
        job.step.fail(error)
        job.done(error)
