"""For methods that ask for one mean and remember nothing: no thread of ours, so nothing to hand over.

The hook itself issues the operation, and the program ends where the answer arrives. That is safe because no
second operation follows: a collective issued from a future's callback is what lanes are there to avoid
(see `lanes.py`). What it saves is two changes of thread per bucket, which on small buckets cost more than
everything else thinwire does.
"""

from __future__ import annotations

import torch

from thinwire.drivers.blocking import finish
from thinwire.drivers.lanes import Job, Step
from thinwire.net import frames
from thinwire.net.executor import ProcessGroupExecutor


class Direct:
    """Issues each program's only operation in the caller's thread; many can be under way at once."""

    def __init__(self, executor: ProcessGroupExecutor) -> None:
        self._executor = executor
        self._broken: list[BaseException] = []

    def submit(self, number: int, job: Job) -> None:
        """Start a program. All go through one group, in the order of the calls."""
        del number
        job.step.enter()
        broken = self._broken
        try:
            if broken:
                raise broken[0]
            op = job.program.send(None)
            if not isinstance(op, frames.AllReduce):
                raise AssertionError(f"a memoryless exchange asked for {type(op).__name__}, not for a mean")
            self._executor.issue(op, lambda error: _arrived(job, op, error, broken))
        except StopIteration:
            job.step.leave()
            job.done(None)
        except BaseException as error:  # handed to the waiting training loop, whatever it is
            _fail(job, error, broken)

    def mean(
        self, tensor: torch.Tensor, step: Step, errors: list[BaseException]
    ) -> torch.futures.Future[torch.Tensor]:
        """For an exchange that is `plain`: the same without a program. Errors are for the host to raise."""
        step.enter()
        broken = self._broken
        if broken:
            raise broken[0]

        def done(error: BaseException | None) -> None:
            if error is None:
                step.leave()
            else:
                broken.append(error)
                errors.append(broken[0])
                step.fail(broken[0])

        return self._executor.sum_of(tensor.mul_(1.0 / self._executor.rank_info.size), done)

    def close(self) -> None:
        """Nothing to end: there is no thread."""


# Functions, not methods: what runs on a thread of the process group must not hold the group. As its last
# holder it would destroy the group there, and a thread cannot wait for its own end.


def _arrived(
    job: Job, op: frames.AllReduce, error: BaseException | None, broken: list[BaseException]
) -> None:
    try:
        if error is not None:
            raise error
        finish(job.program, op.tensor)
    except BaseException as raised:
        _fail(job, raised, broken)
    else:
        job.step.leave()
        job.done(None)


def _fail(job: Job, error: BaseException, broken: list[BaseException]) -> None:
    broken.append(error)
    job.program.close()
    job.step.fail(broken[0])
    job.done(broken[0])
