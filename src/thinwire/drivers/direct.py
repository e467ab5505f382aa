"""A driver without threads, for methods that are one mean without state.

The hook itself issues the operation, and the program ends in the callback that delivers the answer. This is
safe because no second operation follows: lanes exist to avoid collectives issued from a future's callback
(see `lanes.py`). It saves two thread switches per bucket, which on small buckets cost more than everything
else that thinwire does. For tensors on a CPU only: what a callback queues on a GPU would need a stream.
"""

from __future__ import annotations

import torch

from thinwire.drivers.blocking import finish
from thinwire.drivers.lanes import Job, Step
from thinwire.net import frames
from thinwire.net.executor import ProcessGroupExecutor


class Direct:
    """Issues the only operation of each program in the caller's thread; many can be in flight at once."""

    def __init__(self, executor: ProcessGroupExecutor) -> None:
        self._executor = executor
        self._broken: list[BaseException] = []

    def submit(self, number: int, job: Job) -> None:
        """Start a program. All programs use one group, in the order of the calls."""
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
        """The same without a program, for an exchange that is an exact mean. The host raises the errors."""
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


# Functions, not methods: code that runs on a thread of the process group must not hold a reference to the
# group. The last reference would destroy the group there, and a thread cannot wait for its own end.


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
