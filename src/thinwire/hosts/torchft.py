"""torchft: replica groups come and go, and the training goes on with those that are there.

A per-step method averages the gradients inside `manager.should_commit()`, which torchft's optimizer wrapper
calls in `step()`. The vote decides whether residuals change. A schedule asks for a quorum and a vote in every
sync round; between them nobody waits for anybody.

A replica group may have several ranks. DDP or FSDP2 averages the gradients inside of the group, as without
thinwire, and each rank averages what it has, a replica or its shards, with its fellows in the other groups.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
from torch import nn

from thinwire import log
from thinwire.averaging.base import Schedule
from thinwire.averaging.clock import COUNTERS
from thinwire.averaging.sync_round import SyncRound
from thinwire.core import schema
from thinwire.core.exchange import Exchange
from thinwire.core.optimizers import Given, Optimizers
from thinwire.core.schema import is_finite
from thinwire.core.shards import is_sharded, named_shards, sharded_like
from thinwire.errors import ConfigError, ThinwireError
from thinwire.hosts.fsdp import check_gradients, reshard
from thinwire.hosts.model import bare, watch_steps
from thinwire.hosts.replica_groups import Manager, ReplicaGroups, has_session
from thinwire.net.link import Links
from thinwire.net.meter import Timed
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.base import BaseSession
from thinwire.sessions.gradient import Session
from thinwire.sessions.periodic import PeriodicSession
from thinwire.sessions.preparation import prepare_for

ATTEMPTS = 10
"""How often `sync()` tries again if its sync round is aborted."""
ALONE = RankInfo(0, 1)


def attach_managed(
    model: nn.Module,
    method: Exchange | Schedule,
    manager: Any,
    *,
    seed: int,
    dense_below: int,
    optimizer: Given,
) -> BaseSession:
    """Train with the replica groups of torchft's manager; the arguments are those of `thinwire.attach`."""
    _check_manager(manager)
    _check_model(model)
    reshard(model)
    optimizers = list(Optimizers(optimizer))
    if isinstance(method, Exchange):
        if len(optimizers) > 1 and any(map(_is_wrapped, optimizers)):
            raise ConfigError(
                "torchft's optimizer votes in its step, and a training step has one vote: give the "
                "optimizers inside, call manager.start_quorum() before the backward pass, and step them all "
                "if manager.should_commit() returns True"
            )
        inside = [cast(Any, each).optim if _is_wrapped(each) else each for each in optimizers]
        return ManagedSession(model, method, manager, seed=seed, dense_below=dense_below, optimizer=inside)
    if any(map(_is_wrapped, optimizers)):
        raise ConfigError(
            f"{method.name} asks for a quorum in its sync rounds, torchft's optimizer in every step: give "
            "the optimizer inside it, and step that one"
        )
    return ManagedPeriodicSession(
        model, method, manager, optimizer=optimizer, seed=seed, dense_below=dense_below
    )


def _check_manager(manager: Any) -> None:
    try:
        from torchft import Manager as TorchftManager
        from torchft.manager import WorldSizeMode
    except ImportError as error:
        raise ConfigError("manager is a torchft.Manager: pip install 'thinwire[torchft]'") from error
    if not isinstance(manager, TorchftManager):
        raise ConfigError(f"manager must be a torchft.Manager, not a {type(manager).__name__}")
    private = cast(Any, manager)
    if private._use_async_quorum:
        raise ConfigError(
            "a group that joins late would send zeros as if they were its gradient: make the manager with "
            "use_async_quorum=False"
        )
    if private._replica_world_size_mode is not WorldSizeMode.DYNAMIC:
        raise ConfigError(
            "spare groups would send zeros as if they were their gradients: make the manager with "
            "world_size_mode=WorldSizeMode.DYNAMIC"
        )
    if not private._user_state_dicts:
        raise ConfigError(
            "a group that joins needs a peer's model: give load_state_dict and state_dict of the model and "
            "the optimizer to the manager"
        )
    if has_session(manager):
        raise ConfigError("this manager has a thinwire session already: detach() it first")


def _check_model(model: nn.Module) -> None:
    from torchft.ddp import DistributedDataParallel as TorchftDDP
    from torchft.ddp import PureDistributedDataParallel

    if isinstance(model, TorchftDDP | PureDistributedDataParallel):
        raise ConfigError(
            "torchft's own DistributedDataParallel averages gradients in full precision: attach the model "
            "inside it"
        )


def _is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    from torchft import Optimizer

    return isinstance(optimizer, Optimizer)


def _no_throttle() -> NoReturn:
    raise ConfigError("replica groups come and go, so their links cannot be throttled: use `thinwire lab`")


class ManagedSession(Session):
    """Averages gradients over the replica groups of a quorum, in every step.

    Gradients are averaged inside `manager.should_commit()`. If this group does not commit, gradients and
    residuals are as before. A step with numbers that are not finite is not committed by any group.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Exchange,
        manager: Manager,
        *,
        seed: int,
        dense_below: int,
        optimizer: Given,
    ) -> None:
        named = named_shards((name, p) for name, p in bare(model).named_parameters() if p.requires_grad)
        _check_parameters(named, method)
        super().__init__(
            named.items(), method, seed=seed, dense_below=dense_below, optimizer=optimizer, rank_info=ALONE
        )
        if self.reconcile_every is not None:
            raise ConfigError(
                f"{method.name} gives every group a result of its own, so a group that joins would have "
                "another model; take one that gives all the same, such as qsgd or topk"
            )
        sharded = any(map(is_sharded, named.values()))
        if sharded:
            self.needs_forward("FSDP gathers parameters in it")
        prepare_for(self.engine.exchanges, loud=True)
        self.engine.confirms = False  # every new quorum compares its groups
        self._manager = manager
        parameters = self.engine.parameters
        self._groups = ReplicaGroups(
            manager,
            self.engine,
            self.engine.describe,
            lambda: list(parameters.values()),
            sharded=sharded,
        )
        self.on_detach(self._groups.register(self._groups.load, self._groups.save))
        self.on_detach(self._groups.leave)
        cast(Any, manager).should_commit = self._should_commit
        self.on_detach(lambda: delattr(manager, "should_commit"))

    def _should_commit(self, timeout: timedelta | None = None) -> bool:
        """Average the gradients, then vote; takes the place of the manager's own."""
        engine = self.engine
        gradients = {name: p.grad for name, p in engine.parameters.items()}
        results, views = engine.views(gradients)
        engine.step = self._manager.current_step()  # equal on all groups, also after an aborted step
        engine.begin_step()
        committed = self._groups.run(
            engine.program(views), timeout, only_finite=lambda: all(map(is_finite, results.values()))
        )
        engine.end_step(committed)
        if committed:
            for name, parameter in engine.parameters.items():
                parameter.grad = sharded_like(results[name], parameter)
        return committed

    @property
    def step(self) -> int:
        """Committed steps of the job so far; equal on all groups."""
        return self._manager.current_step()

    def finish(self) -> None:
        """The same as `detach`: all groups that have committed the last step have the same model."""
        self.detach()

    def throttle(self, links: str | Links, *, seed: int = 0) -> None:
        """Not for replica groups."""
        _no_throttle()


class ManagedPeriodicSession(PeriodicSession):
    """Sync rounds between the replica groups of a quorum.

    The first sync round is in `attach`: a group that joins waits there for the next sync round of the others
    and starts from their common model. If this group does not commit, its model stays as it is, and its
    change since the last common model is part of the next sync round. If the others have committed a sync
    round without it, it starts from their model; with a `deadline` its change is kept, too.
    """

    takes_deadline = True

    def __init__(
        self,
        model: nn.Module,
        method: Schedule,
        manager: Manager,
        *,
        optimizer: Given,
        seed: int,
        dense_below: int,
    ) -> None:
        if method.fragment_count > 1 or method.delay:
            raise ConfigError(
                f"{method} synchronises parts of the model, or applies results later; a group that joins "
                "needs the whole model at once: take a schedule without fragments, groups and overlap, such "
                "as pqasgd(every=8)"
            )
        if method.gradient_warmup and method.warmup:
            raise ConfigError(
                f"{method.name} averages gradients in its warm-up, which groups that come and go cannot do: "
                f"take {method.name}(warmup=0), or another schedule"
            )
        super().__init__(bare(model), method, optimizer, seed=seed, dense_below=dense_below, rank_info=ALONE)
        prepare_for(self.engine.exchanges, loud=True)
        self._manager = manager
        self._committed = False
        self._synced = 0
        self._peer: Mapping[str, Any] | None = None
        self._attempt: tuple[int, list[torch.Tensor]] | None = None
        self._warned = False
        self._groups = ReplicaGroups(
            manager,
            self.engine,
            lambda: self.engine.describe() | self.describe(),
            lambda: [tensor for own in self._common().values() for tensor in own.values()],
            sharded=any(map(is_sharded, self.parameters.values())),
            keep_late=method.patience is not None,
        )
        self.on_detach(self._groups.register(self._load_from_peer, self._save_for_peer))
        self.on_detach(self._groups.leave)
        try:
            self.sync()
        except BaseException:
            self.detach()
            raise
        self.on_detach(watch_steps(self))

    # -- sync rounds -------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Synchronise now, whatever the schedule says; tries again if the sync round is aborted."""
        for _ in range(ATTEMPTS):
            self._sync_now(self._forced())
            if self._committed:
                return
        raise ThinwireError(f"{ATTEMPTS} sync rounds were aborted one after the other: see the log")

    def _sync_round(
        self, numbers: Sequence[int], delay: int, *, buffers: bool, forced: bool = False
    ) -> SyncRound:
        """All of the model, and after the quorum: a group that is behind gets the common model there."""
        blocks = self.blocks if self._keeps_change else []
        own = [torch.sub(block.anchor.to(block.layout.device), block.read()) for block in blocks]
        self._peer = None
        begin = time.monotonic()
        self._manager.start_quorum()
        if own and self._peer is not None:
            self._catch_up(own, self._peer)
        elif own:
            self._check_wait(time.monotonic() - begin)
        self.sync_rounds = self._manager.current_step()
        return super()._sync_round([0], 0, buffers=True)

    def _sync_now(self, sync_round: SyncRound) -> None:
        before = self.meter.total
        if self._keeps_change:
            self._attempt = (
                self._manager.current_step(),
                [block.in_order(change) for block, change in sync_round.results()],
            )
        self._committed = self._groups.run(Timed(self._program(sync_round), self.meter))
        if self._committed:
            self._attempt = None
            self._announce(self.meter.total.minus(before))
            self._apply(sync_round)
            self._synced = self.clock.synced = sync_round.step
        else:
            self.clock.synced = self._synced
            log.warning("the change of this group is part of its next sync round")

    # -- a group that was late ---------------------------------------------------------------------------

    @property
    def _keeps_change(self) -> bool:
        """Whether this group's change is kept if it is behind: with a deadline, and if it is not new."""
        return self.method.patience is not None and self._groups.age > 0

    def _catch_up(self, own: list[torch.Tensor], peer: Mapping[str, Any]) -> None:
        """Put this group's change on top of the common model, unless a sync round of the others has it."""
        attempt = self._attempt
        if attempt is not None and peer["contributed"].get(self._groups.session) == attempt[0]:
            # This group failed where the others went through: they have what it had sent.
            for change, sent in zip(own, attempt[1], strict=True):
                change.sub_(sent)
        with torch.no_grad():
            for block, change in zip(self.blocks, own, strict=True):
                block.write(block.anchor.to(change.device) - change)

    def _check_wait(self, seconds: float) -> None:
        deadline = cast(float, self.method.patience)
        if seconds > deadline + 1 and not self._warned:
            self._warned = True
            log.warning(
                "a sync round waited %.1f s, longer than deadline=%g: the lighthouse decides how long; start "
                "it with --join_timeout_ms %d",
                seconds,
                deadline,
                round(1000 * deadline),
            )

    # -- the state of a group that is behind -------------------------------------------------------------

    def _save_for_peer(self) -> dict[str, Any]:
        return {
            **self._groups.save(),
            "schedule": str(self.method),
            "clock": self.clock.save(),
            "contributed": dict(self._groups.contributed),
            **{
                field: {key: kept.clone() for key, kept in own.items()}
                for field, own in self._common().items()
            },
        }

    def _load_from_peer(self, given: Mapping[str, Any]) -> None:
        """Continue from the last common model, whatever the peer's own steps have made of it."""
        common = self._common()
        found = schema.check(
            {
                "schedule": schema.equal(str(self.method)),
                "clock": schema.record(dict.fromkeys(COUNTERS, schema.whole())),
                "contributed": schema.mapping(),
                **{field: schema.tensors(own) for field, own in common.items()},
            },
            given,
            "the peer",
        )
        self._groups.load(given, keep_residuals=self._keeps_change)
        self._peer = found
        self.clock.load(found["clock"])
        with torch.no_grad():
            for field, own in common.items():
                for key, tensor in own.items():
                    tensor.copy_(found[field][key])
            for block in self.blocks:
                block.write(block.anchor)

    def _digest(self) -> int:
        """Nothing: every new quorum compares its groups, and those that join would confirm at other times."""
        return 0

    def _common(self) -> dict[str, dict[str, torch.Tensor]]:
        """The last common model and its momentum, equal on all groups."""
        blocks = {str(number): block for number, block in enumerate(self.blocks)}
        velocities = {key: block.velocity for key, block in blocks.items() if block.velocity is not None}
        return {"anchors": {key: block.anchor for key, block in blocks.items()}, "velocities": velocities}

    def throttle(self, links: str | Links, *, seed: int = 0) -> None:
        """Not for replica groups."""
        _no_throttle()


def _check_parameters(parameters: Mapping[str, torch.Tensor], method: Exchange) -> None:
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            check_gradients(method)
        elif type(parameter.data) is not torch.Tensor:
            raise ConfigError(
                f"{name!r} is a {type(parameter.data).__name__}: with a manager parameters are plain dense "
                "tensors, or shards of FSDP2"
            )
