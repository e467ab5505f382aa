"""The interface of every session, whatever its method."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from thinwire import log
from thinwire.averaging.base import Schedule
from thinwire.core import checks, schema
from thinwire.core.channel import Program
from thinwire.core.engine import Engine
from thinwire.core.exchange import Exchange
from thinwire.drivers.behind import Behind
from thinwire.drivers.blocking import Blocking
from thinwire.errors import ThinwireError
from thinwire.net import costs, executor
from thinwire.net.link import Links
from thinwire.net.meter import Meter
from thinwire.net.rank_info import RankInfo
from thinwire.sessions import rank_keys
from thinwire.sessions.checkpoint import OnResize, dealt
from thinwire.sessions.preparation import prepare_for
from thinwire.sessions.replicas import Replicas

States = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class BaseSession(ABC):
    """One method on one model: a facade over an engine."""

    engine: Engine
    """Plans, states and programs, for hosts and drivers."""
    behind: Behind | None = None
    """Runs the exchanges of a method with a delay."""

    def start(
        self,
        process_group: dist.ProcessGroup | None,
        rank_info: RankInfo | None,
        *,
        lanes: int = 1,
        inner_group: dist.ProcessGroup | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        """Compile the kernels and join the group; with `rank_info` a driver runs this rank instead."""
        exchanges = self.engine.exchanges
        if rank_info is None:
            on_cpu = all(tensor.device.type == "cpu" for tensor in self.engine.parameters.values())
            prepare_for(exchanges if on_cpu else (), loud=dist.is_initialized() and dist.get_rank() == 0)
            self.engine.open(process_group, lanes, inner_group)
        else:
            self.engine.place(rank_info)
        if self.engine.speaks:
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
        """The payload of a step without frame headers; None if it depends on the data.

        By the link of the session, given or measured: on another one other operations may be the cheapest.
        """
        return self.engine.payload_bytes()

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger, of this rank. All but the ones from `ratio_to_dense` on
        are totals that a resumed run continues.

        - `steps`; `skipped_steps`: those that were aborted because a number was not finite (for a schedule:
          aborted sync rounds);
        - `bytes_sent`, `bytes_received`: through this rank's network interface, without TCP/IP headers;
        - `bytes_sent_inside`, `bytes_received_inside`: inside this rank's host, only with `hierarchical`;
        - `rounds`: collectives, one after the other; for a schedule also `sync_rounds`;
        - `waiting_seconds`: at least one collective was in flight. Computation may have gone on meanwhile;
        - `compression_seconds`: the method's own work, which may overlap with computation as well;
        - `ratio_to_dense`: `bytes_sent` against a ring all-reduce of all parameters in every step;
        - `link_latency`, `link_bandwidth`: seconds per hop and bytes per second by which the session decides,
          only if they are measured;
        - `fewer_operations`: 1 if it takes fewer operations with more bytes, only if that is measured;
        - `merged_buckets`: 1 if the buckets of a step are exchanged together, only if that is measured;
        - `residual_norm`: of what this rank has not sent yet, now; 0 for a method without residuals.

        Call it between two steps. Nothing is sent, and the residuals are read once.
        """
        meter, total = self.meter, self.meter.total
        dense = meter.steps * costs.all_reduce(self.rank_info.size, self.dense_bytes).sent
        norms = [float(residual.norm()) / self.engine.scale for residual in self.residuals().values()]
        inside, measured = dict[str, float](), self.engine.measured
        if self.engine.hosts is not None:
            inside["bytes_sent_inside"] = meter.inside.sent_bytes
            inside["bytes_received_inside"] = meter.inside.received_bytes
        return {
            "steps": meter.steps,
            "skipped_steps": meter.skipped_steps,
            "bytes_sent": total.sent_bytes,
            "bytes_received": total.received_bytes,
            **inside,
            "rounds": total.operations,
            "waiting_seconds": meter.network_seconds,
            "compression_seconds": meter.work_seconds,
            "ratio_to_dense": total.sent_bytes / dense if dense else 0.0,
            **({} if measured is None else measured.metrics()),
            "residual_norm": math.hypot(*norms),
        }

    # -- replicas --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def reconcile_every(self) -> int | None:
        """The number of steps after which replicas are made equal; None if they always are."""

    @abstractmethod
    def reconcile(self) -> None:
        """Make all ranks' parameters equal now, to the last bit. Call it on every rank."""

    def common_model(self) -> AbstractContextManager[None]:
        """Inside, the model has the parameters of the last common model; nothing is sent.

        A method whose replicas are equal, or drift by less than the reconciliation brings back, has no other
        model than this rank's own: nothing changes then. See `PeriodicSession.common_model`.
        """
        return nullcontext()

    @abstractmethod
    def replicas(self) -> Replicas:
        """This rank's parameters."""

    @property
    def held(self) -> frozenset[str]:
        """The names of parameters and buffers that the session's own state holds, with the optimizer's state.

        Only a periodic session holds them: they differ between the ranks.
        """
        return frozenset()

    def spread(self) -> float:
        """How far apart the replicas are: the largest distance from the mean, relative to its norm.

        This costs one dense mean of the parameters. Call it on every rank; the answer is equal on all.
        """
        self.wait()
        result: list[float] = []
        self.run(self.replicas().spread(self.rank_info, self.step, self.engine.link, result))
        return result[0]

    def residuals(self) -> dict[str, Any]:
        """The part of past gradients that this rank has not sent yet, by parameter.

        With a delay also this rank's part of the means that the next step applies.
        """
        self.wait()
        return self.engine.residuals()

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank needs to continue bit for bit: tensors, numbers and strings only.

        There is one per rank, because residuals differ, and its keys say which: a session is `Stateful`, and
        `dcp.save({"model": ..., "thinwire": session})` keeps the state of every rank. It also loads with
        `torch.load(..., weights_only=True)`, and has a checksum of every tensor.

        After a failure, such as a `PeerError`, this is the state of the last step that was committed.
        """
        self._asked, self._expected = self._expected, None
        if self._asked is not None:
            size, olds, _ = self._asked
            return rank_keys.template(olds or [0], size, self.engine.parameters, self.engine.first_rank)
        return rank_keys.pack(self.sealed(), self.engine.parameters, self.engine.first_rank)

    def sealed(self) -> dict[str, Any]:
        """The same as one nested mapping, without the rank in its keys."""
        return schema.seal(self.snapshot())

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """A copy like `sealed()`, without the checksums that take most of its time."""

    def load_state_dict(self, state: States, *, on_resize: OnResize | None = None) -> None:
        """Continue from a `state_dict` of this rank; the model, method and rank must be the same.

        A schedule also sets parameters, buffers and the optimizer's state.

        With another world size, choose what happens to the residuals:

        - `on_resize="sum"`: this rank gets the sum of the residuals of the given states. Pass the state of
          each old rank to exactly one new rank (as a list, if a rank gets several), and nothing is lost.
        - `on_resize="drop"`: residuals start at zero; state that is equal on all ranks is kept. Any old
          rank's state will do.

        The local steps of a schedule since its last sync round cannot be loaded with another world size: call
        `sync()` before you write the checkpoint, or use `on_resize="drop"`.
        """
        states = [sealed for one in schema.as_list(state) for sealed in rank_keys.unpack(one)]
        if self._asked is not None:
            _, olds, how = self._asked
            self._asked, on_resize = None, how if olds else "drop"
        self.load_sealed(states, on_resize)

    @abstractmethod
    def load_sealed(self, states: Sequence[Mapping[str, Any]], on_resize: OnResize | None) -> None:
        """`load_state_dict` with what `sealed()` returned, of one or several ranks."""

    _expected: tuple[int, list[int], OnResize] | None = None
    _asked: tuple[int, list[int], OnResize] | None = None  # by the `state_dict` before

    def expect(self, checkpoint: int | str | os.PathLike[str], *, on_resize: OnResize = "sum") -> None:
        """Before `dcp.load` if the number of ranks may have changed: the folder, or how many ranks wrote it.

        Then `dcp.load` asks for the states of those ranks, each on exactly one of the new ranks. Call it on
        every rank.
        """
        size = checkpoint if isinstance(checkpoint, int) else rank_keys.ranks_in(checkpoint)
        checks.whole("expect", "the number of ranks", size, 1)
        if size == self.rank_info.size:
            self._expected = None
            return
        self._expected = size, dealt(self.engine, size), on_resize

    # -- the network -----------------------------------------------------------------------------------

    def throttle(self, links: str | Links, *, seed: int = 0) -> None:
        """From now on every operation takes as long as on this link; "none" ends it.

        Call it on every rank, between two steps. See `thinwire.net.link` for link strings and
        `thinwire.net.throttle` for the model.

            session = thinwire.attach(model, "qsgd(bits=4)", optimizer=optimizer)
            session.throttle("100mbit,latency=5ms;3:20mbit")
        """
        self.wait()
        executor.throttle(self.engine.executors, links, seed=seed)
        self.engine.probe()

    def wait(self) -> None:
        """Wait until no exchange is under way; only a delay leaves one under way between steps.

        Raises the error that ended it, such as a `PeerError`.
        """
        if self.behind is not None:
            self.behind.wait()

    def run(self, program: Program) -> bool:
        """Run a program on the first private group; True if the step was committed."""
        try:
            self.wait()
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
