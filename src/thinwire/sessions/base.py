"""The interface of every session, whatever its method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from thinwire import log
from thinwire.averaging.base import Schedule
from thinwire.core import schema
from thinwire.core.channel import Program
from thinwire.core.engine import Engine
from thinwire.core.exchange import Exchange
from thinwire.drivers.blocking import Blocking
from thinwire.errors import ThinwireError
from thinwire.net import executor
from thinwire.net.link import Links
from thinwire.net.meter import Meter
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.checkpoint import OnResize
from thinwire.sessions.preparation import prepare_for
from thinwire.sessions.replicas import Replicas

States = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class BaseSession(ABC):
    """One method on one model: a facade over an engine."""

    engine: Engine
    """Plans, states and programs, for hosts and drivers."""

    def start(
        self,
        process_group: dist.ProcessGroup | None,
        rank_info: RankInfo | None,
        *,
        lanes: int = 1,
        warnings: Sequence[str] = (),
    ) -> None:
        """Compile the kernels and join the group; with `rank_info` a driver runs this rank instead."""
        exchanges = self.engine.exchanges
        if rank_info is None:
            on_cpu = all(tensor.device.type == "cpu" for tensor in self.engine.parameters.values())
            prepare_for(exchanges if on_cpu else (), loud=dist.is_initialized() and dist.get_rank() == 0)
            self.engine.open(process_group, lanes)
        else:
            self.engine.rank_info = rank_info
        if self.rank_info.rank == 0:
            for warning in (*warnings, *(exchange.warning for exchange in exchanges)):
                if warning is not None:
                    log.warning("%s", warning)

    # -- what it is and what it costs ------------------------------------------------------------------

    @property
    def method(self) -> Exchange | Schedule:
        """The method, with all its options."""
        return self.engine.method

    @property
    def meter(self) -> Meter:
        """Bytes, rounds and seconds so far."""
        return self.engine.meter

    @property
    def step(self) -> int:
        """Steps so far; equal on all ranks."""
        return self.engine.step

    @property
    def rank_info(self) -> RankInfo:
        """This rank and the number of ranks."""
        return self.engine.rank_info

    @property
    def dense_bytes(self) -> int:
        """The payload of an uncompressed step."""
        return self.engine.dense_bytes

    def payload_bytes(self) -> float | None:
        """The payload of a step without frame headers; None if it depends on the data."""
        return self.engine.payload_bytes()

    def metrics(self) -> dict[str, float]:
        """Averages per step so far, under names for a logger."""
        meter, total = self.meter, self.meter.total
        steps = max(meter.steps, 1)
        return {
            "steps": meter.steps,
            "payload_bytes_per_step": total.payload_bytes / steps,
            "sent_bytes_per_step": total.sent_bytes / steps,
            "received_bytes_per_step": total.received_bytes / steps,
            "rounds_per_step": total.operations / steps,
            "network_seconds_per_step": meter.network_seconds / steps,
            "work_seconds_per_step": meter.work_seconds / steps,
            "payload_share_of_dense": total.payload_bytes / (steps * max(self.dense_bytes, 1)),
        }

    # -- replicas --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def reconcile_every(self) -> int | None:
        """The number of steps after which replicas are made equal; None if they always are."""

    @abstractmethod
    def reconcile(self) -> None:
        """Make all ranks' parameters equal now, to the last bit. Call it on every rank."""

    @abstractmethod
    def replicas(self) -> Replicas:
        """This rank's parameters."""

    def spread(self) -> float:
        """How far apart the replicas are: the largest distance from the mean, relative to its norm.

        This costs one dense mean of the parameters. Call it on every rank; the answer is equal on all.
        """
        result: list[float] = []
        self.run(self.replicas().spread(self.rank_info, self.step, self.engine.link, result))
        return result[0]

    def residuals(self) -> dict[str, Any]:
        """The part of past gradients that this rank has not sent yet, by parameter."""
        return self.engine.residuals()

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to continue bit for bit: tensors, numbers and strings only.

        There is one per rank, because residuals differ. It loads with `torch.load(..., weights_only=True)`,
        and has a checksum of every tensor.

        After a failure, such as a `PeerError`, this is the state of the last step that was committed.
        """
        return schema.seal(self.snapshot())

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """A copy like `state_dict()`, without the checksums that take most of its time."""

    @abstractmethod
    def load_state_dict(self, state: States, *, on_resize: OnResize | None = None) -> None:
        """Continue from a `state_dict` of this rank; the model, method and rank must be the same.

        With another world size, choose what happens to the residuals:

        - `on_resize="sum"`: this rank gets the sum of the residuals of the given states. Pass the state of
          each old rank to exactly one new rank (as a list, if a rank gets several), and nothing is lost.
        - `on_resize="drop"`: residuals start at zero; state that is equal on all ranks is kept. Any old
          rank's state will do.
        """

    # -- the network -----------------------------------------------------------------------------------

    def throttle(self, links: str | Links, *, seed: int = 0) -> None:
        """From now on every operation takes as long as on this link; "none" ends it.

        Call it on every rank, between two steps. See `thinwire.net.link` for link strings and
        `thinwire.net.throttle` for the model.

            session = thinwire.attach(model, "topk")
            session.throttle("100mbit,latency=5ms;3:20mbit")
        """
        executor.throttle(self.engine.executors, links, seed=seed)

    def run(self, program: Program) -> bool:
        """Run a program on the first private group; True if the step was committed."""
        try:
            execute = self.engine.executor.execute
        except ThinwireError:
            program.close()  # or Python warns that nobody has awaited it
            raise
        return Blocking(execute).run(program)

    # -- the end ---------------------------------------------------------------------------------------

    _detach_hooks: tuple[Callable[[], None], ...] = ()

    def on_detach(self, hook: Callable[[], None]) -> None:
        """Register a function for `detach`, with which a host removes its hooks; called in this order."""
        self._detach_hooks = (*self._detach_hooks, hook)

    def detach(self) -> None:
        """Stop: remove the host's hooks, end the threads, close the private groups.

        Call it on every rank. Afterwards the session can still be read and saved.
        """
        hooks, self._detach_hooks = self._detach_hooks, ()
        for hook in hooks:
            hook()
        self.engine.close()
