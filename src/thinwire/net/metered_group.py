"""A process group whose sums are metered and may be throttled, for communication that is not thinwire's.

PyTorch's own hooks (plain DDP, `fp16_compress_hook`, PowerSGD) know nothing of a session. Given this group in
place of the default one, they issue the same sums in the same order. Each sum is counted by the formulas of
the meter, and takes as long as a session's sum of the same length would take on the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from thinwire.errors import ThinwireError
from thinwire.net.executor import ProcessGroupExecutor, throttle
from thinwire.net.frames import AllReduce
from thinwire.net.groups import private_groups
from thinwire.net.link import Links
from thinwire.net.meter import Meter

Sum = torch.futures.Future[list[torch.Tensor]]


class MeteredGroup(dist.ProcessGroup):
    """All ranks of the default group. Only sums are metered and throttled: only they belong to a step.

    Everything else (the checks and broadcasts of DDP's constructor, its broadcasts of buffers) goes through
    the default group, as it does beside a session.
    """

    def __init__(self) -> None:
        home = cast(dist.ProcessGroup, dist.group.WORLD)
        cast(Any, super()).__init__(home.rank(), home.size())
        self.meter = Meter()
        self._home: Any = home
        self._executor = ProcessGroupExecutor(private_groups(home, 1)[0], self.meter)
        self._executor.label = "a bucket"
        # The hooks wait for a second sum inside the callback of the first: that must not hold up the thread
        # that ends sums.
        self._callbacks = ThreadPoolExecutor(thread_name_prefix="thinwire-sum")

    def throttle(self, links: str | Links, *, seed: int = 0) -> None:
        """Let sums take as long as on this link; see `Session.throttle`."""
        throttle([self._executor], links, seed=seed)

    def close(self) -> None:
        """Leave the private group, on all ranks."""
        self._executor.close()
        self._callbacks.shutdown()

    def allreduce(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None) -> dist.Work:  # pyright: ignore[reportIncompatibleMethodOverride]
        (tensor,) = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
            raise ThinwireError(f"a metered group only sums, it has no {opts.reduceOp}")
        asked = AllReduce(tensor, tensor.numel() * tensor.element_size())

        def done(error: BaseException | None) -> list[torch.Tensor]:
            if error is not None:
                raise error
            return [tensor]

        if self._executor.pace is None:
            return _Work(self._executor.issue(asked, done))
        future: Sum = torch.futures.Future()

        def hand_over(error: BaseException | None) -> None:
            self._callbacks.submit(_complete, future, tensor, error)

        self._executor.issue(asked, hand_over)
        return _Work(future)

    def broadcast(self, *arguments: Any) -> dist.Work:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._home.broadcast(*arguments)

    def allgather(self, *arguments: Any) -> dist.Work:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._home.allgather(*arguments)

    def barrier(self, *arguments: Any) -> dist.Work:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._home.barrier(*arguments)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "thinwire-metered"


def _complete(future: Sum, tensor: torch.Tensor, error: BaseException | None) -> None:
    if error is None:
        future.set_result([tensor])
    else:
        cast(Any, future).set_exception(error)


class _Work(dist.Work):
    """What DDP and its hooks ask of a sum under way."""

    def __init__(self, future: Sum) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout  # the private group has one
        self._future.wait()
        return True

    def get_future(self) -> Sum:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._future
