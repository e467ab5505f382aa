"""Periodic averaging of a model: local steps are counted, sync rounds run, and all of it can be saved."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire import log
from thinwire.averaging.base import Outer, Schedule
from thinwire.averaging.clock import Clock
from thinwire.averaging.fragments import Block, Fragment, cut
from thinwire.averaging.gradient_warmup import GradientWarmup
from thinwire.averaging.spares import Spares
from thinwire.averaging.sync_round import NOTE_BYTES, SyncRound, remembered
from thinwire.core.agreement import EVERY, digest_of
from thinwire.core.channel import Program
from thinwire.core.engine import Engine
from thinwire.core.optimizers import Given, Optimizers
from thinwire.core.schema import is_finite
from thinwire.core.shards import is_first_shard, is_sharded, local, named_shards
from thinwire.drivers.lanes import Job, Lanes, Step, future_for
from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.dense import Dense
from thinwire.net.costs import Link
from thinwire.net.meter import Tally, Timed
from thinwire.net.rank_info import RankInfo
from thinwire.sessions import periodic_checkpoint
from thinwire.sessions.base import BaseSession
from thinwire.sessions.checkpoint import OnResize
from thinwire.sessions.first_rank import from_first_rank
from thinwire.sessions.replicas import Replicas


class PeriodicSession(BaseSession):
    """Local steps on every rank, and sync rounds according to the schedule.

    `thinwire.attach(model, "pqasgd(every=8)", optimizer=optimizer)` makes one and calls it after every
    `optimizer.step()`.

    Between sync rounds the replicas differ. `sync()` synchronises them now, `common_model()` gives the last
    common model without any communication.

    Args:
        model: this rank's replica, without a DistributedDataParallel wrapper.
        method: the schedule.
        optimizer: the optimizer that takes the local steps, or several, such as [muon, adamw].
        process_group: the ranks to synchronise with; None is the default group.
        seed: of the random numbers that the ranks share.
        dense_below: tensors with fewer entries, and short vectors, are sent dense; 0 compresses all.
        inner_group: for `hierarchical`: the process group of this rank's host, such as
            `mesh["local"].get_group()`; None takes consecutive ranks.
        rank_info: only for ranks run by the Lockstep or Simulated driver: which rank this is. The models
            must be equal at the start; the driver runs the programs of `advance` and `sync_program`.
        link: the link by which the cheapest of gather, direct sends and broadcasts is chosen.
    """

    takes_deadline = False
    """Whether a sync round can go on without a rank that is late."""

    def __init__(
        self,
        model: nn.Module,
        method: Schedule,
        optimizer: Given,
        process_group: dist.ProcessGroup | None = None,
        *,
        seed: int = 0,
        dense_below: int = 1024,
        inner_group: dist.ProcessGroup | None = None,
        rank_info: RankInfo | None = None,
        link: Link | None = None,
    ) -> None:
        if method.patience is not None and not self.takes_deadline:
            raise ConfigError(
                f"{method.name}: a fixed process group waits for all of its ranks. deadline is for torchft's "
                "replica groups: attach(..., manager=manager)"
            )
        self._method = method
        self.optimizers = Optimizers(optimizer)
        self.aborted = 0
        self.sync_rounds = 0
        self.parameters = named_shards((name, p) for name, p in model.named_parameters() if p.requires_grad)
        check_parameters(self.parameters, self.optimizers, method)
        self._model = model
        self.clock = Clock(method, seed)
        self.spares = Spares()
        self.fragments = cut(
            self.parameters,
            method.fragment_count,
            whole_tensors=method.whole_tensors,
            anchor_device=torch.device("cpu") if method.anchor == "cpu" else None,
            velocity=method.outer.momentum > 0,
        )
        self.engine = Engine(
            self.common_parameters().items(),
            method.inner,
            dense=Dense(),
            dense_below=dense_below,
            seed=seed,
            link=link,
        )
        self.engine.confirms = False  # sync rounds do
        for block in self.blocks:
            block.arrange(self.engine.router.exchange_for)
        self.gradient_warmup = (
            GradientWarmup(
                self.blocks, method.warmup_exchange, self.engine.router, steps=method.warmup, seed=seed
            )
            if method.gradient_warmup
            else None
        )
        self._confirmed = False
        self.under_way: list[tuple[SyncRound, Callable[[], None]]] = []
        self._lanes: Lanes | None = None
        self._failure: Exception | None = None
        self._announced = False
        self.start(process_group, rank_info, inner_group=inner_group)
        for fragment in self.fragments:
            self.engine.make_states(fragment.layouts)
        if self.engine.executors:
            try:
                self._begin()
            except BaseException:
                self.detach()
                raise

    def _begin(self) -> None:
        """Compare the settings that the engine does not know, and start from rank 0's model, as DDP does."""
        self.engine.agree(self.describe())
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self.run(from_first_rank(tensors, self.rank_info, self.engine.link))
        for block in self.blocks:
            block.set_anchor()
        self.meter.reset()
        if self.method.delay:
            self._lanes = Lanes(self.engine.executors, overlap=True, outlast_steps=True)

    # -- what it is ------------------------------------------------------------------------------------

    @property
    def method(self) -> Schedule:
        """The schedule, with all its options."""
        return self._method

    @property
    def blocks(self) -> list[Block]:
        """The parameters as the engine sees them: flat, one block per device and type."""
        return [block for fragment in self.fragments for block in fragment.blocks]

    @property
    def step(self) -> int:
        """Optimizer steps so far. The meter counts the same, so bytes per step compare with other methods."""
        return self.clock.step

    @property
    def speaks(self) -> bool:
        """Whether this rank logs for all."""
        return self.rank_info.rank == 0 and all(map(is_first_shard, self.parameters.values()))

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers that are averaged."""
        if not self.method.buffers:
            return {}
        return {name: buffer for name, buffer in self.all_buffers.items() if buffer.is_floating_point()}

    @property
    def all_buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name."""
        return dict(self._model.named_buffers())

    @property
    def held(self) -> frozenset[str]:
        return frozenset({*self.parameters, *self.all_buffers})

    def describe(self) -> dict[str, Any]:
        """This rank's settings, which must be equal on all ranks, besides those that the engine compares."""
        return {
            "schedule": repr(self.method),
            "optimizer": str(self.optimizers),
            "buffers": [_described(name, buffer) for name, buffer in self.all_buffers.items()],
            "parameters": [_described(name, parameter) for name, parameter in self.parameters.items()],
        }

    @property
    def dense_bytes(self) -> int:
        """The payload of one step of plain data-parallel training."""
        return sum(map(_bytes, self.parameters.values()))

    def cycle_bytes(self) -> int | None:
        """The payload of a cycle: every fragment is averaged once. None if it depends on the data."""
        total = sum(map(_bytes, self.buffers.values()))
        for fragment in self.fragments:
            promised = self.engine.payload_bytes(fragment.layouts)
            if promised is None:
                return None
            total += promised + NOTE_BYTES
            if self.method.momentum == "average":
                total += sum(map(_bytes, remembered(self.optimizers, fragment.pieces).values()))
        return total

    def payload_bytes(self) -> float | None:
        """The payload per step, after the warm-up; None if it depends on the data."""
        total = self.cycle_bytes()
        return None if total is None else total / self.method.period

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger; see `Session.metrics`."""
        counted = {"skipped_steps": self.aborted, "sync_rounds": self.sync_rounds}
        return {**super().metrics(), **counted}

    def replicas(self) -> Replicas:
        """This rank's parameters, once sync rounds under way have arrived."""
        self._wait_for_all()
        return Replicas(self.parameters, Optimizers())

    # -- steps -----------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Called by the host before every training step, when the gradients are there."""
        program = self.gradient_program()
        if program is not None:
            self.run(Timed(program, self.meter))

    def gradient_program(self) -> Program | None:
        """For a driver: the coroutine that averages this rank's gradients, in the warm-up of some schedules.

        Call it before every training step, and run the programs of all ranks together.
        """
        return None if self._warm_up is None else self._average_gradients(self._warm_up)

    @property
    def _warm_up(self) -> GradientWarmup | None:
        """What averages the gradients of this step, if it is one of a warm-up on gradients."""
        return self.gradient_warmup if self.step < self.method.warmup else None

    async def _average_gradients(self, warmup: GradientWarmup) -> None:
        for each in self.engine.executors:
            each.label = f"the gradients of step {self.step}"
        if not await warmup.average(self.step, list(self.buffers.values()), self.rank_info, self.engine.link):
            self.aborted += 1
            if self.speaks:
                log.warning(
                    "step %d is skipped on all ranks: a gradient is not finite (%d so far)",
                    self.step,
                    self.aborted,
                )

    def after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Called by the host after every step of one of the optimizers, with its gradients still there."""
        if self.gradient_warmup is not None and self._warm_up is None:
            self.gradient_warmup.scale_second_moments(optimizer, self.rank_info.size)

    def after_step(self) -> None:
        """Called by the host after every training step; runs a sync round if one is due."""
        due = self._count()
        if due is not None and due.late:
            self._sync_in_background(due)
        elif due is not None:
            self._sync_now(due)

    def advance(self) -> Program | None:
        """For a driver: count a step; returns the coroutine of this rank's sync round, if one is due.

        Call it after every training step, and run the programs of all ranks together.
        """
        for optimizer in self.optimizers:
            self.after_optimizer(optimizer)
        due = self._count()
        return None if due is None else self._driven(due)

    def sync(self) -> None:
        """Synchronise all fragments now, whatever the schedule says. A new cycle begins.

        Call it on every rank after the same step. Afterwards all parameters are equal to the last bit. If
        they are equal already, the ranks only compare where they are.
        """
        self._sync_now(self._forced())

    def sync_program(self) -> Program:
        """For a driver: the coroutine of `sync` on one rank."""
        return self._driven(self._forced())

    def finish(self) -> None:
        """`sync()` and `detach()`. Call it on every rank after the last step."""
        self.sync()
        self.detach()

    @property
    def reconcile_every(self) -> int:
        """The number of steps between two sync rounds of the same parameter."""
        return self.method.period

    def reconcile(self) -> None:
        """The same as `sync`."""
        self.sync()

    def common_parameters(self) -> dict[str, torch.Tensor]:
        """The last common model, by parameter (or part of one, if tensors are cut): views for reading."""
        return {
            slot.name: part.view(slot.shape)
            for block in self.blocks
            for slot, part in zip(block.layout.slots, block.layout.parts(block.anchor), strict=True)
        }

    @contextmanager
    def common_model(self) -> Generator[None, None, None]:
        """Inside, the model has the parameters of the last common model (the anchor); nothing is sent.

        Use it to evaluate the model that all ranks share, between sync rounds. Take no optimizer step inside.
        """
        own = [block.read() for block in self.blocks]
        try:
            for block in self.blocks:
                block.write(block.anchor)
            yield
        finally:
            for block, values in zip(self.blocks, own, strict=True):
                block.write(values)

    # -- sync rounds -----------------------------------------------------------------------------------

    def _count(self) -> SyncRound | None:
        if self._failure is not None:
            raise self._failure
        self.meter.count_step()
        if self._warm_up is not None:
            return self._count_warmup_step(self._warm_up)
        due, delay, ends = self.clock.tick()
        while self.under_way and self.under_way[0][0].due <= self.clock.step:
            self._apply_next()
        return self._sync_round(due, delay, buffers=ends) if due else None

    def _count_warmup_step(self, warmup: GradientWarmup) -> None:
        """The replicas have taken the same step, so they are equal: there is nothing to synchronise."""
        if warmup.averaged_step != self.step:
            raise ThinwireError(
                f"the gradients of step {self.step} have not been averaged: {self.method.name} averages them "
                "before each training step of its warm-up (session.before_step, or gradient_program)"
            )
        computed = warmup.computed_since()
        if computed:
            raise ThinwireError(
                f"the gradient of {computed[0]!r} was computed after {self.method.name} had averaged those "
                f"of step {self.step}: in its warm-up every backward pass comes before the first optimizer's "
                "step. Compute all gradients first, or take warmup=0"
            )
        self.clock.tick()
        for block in self.blocks:
            block.set_anchor()

    def _forced(self) -> SyncRound:
        everything = range(len(self.fragments))
        idle = self.clock.all_synced
        while self.under_way:
            self._apply_next()
        self.clock.restart()
        return self._sync_round([] if idle else everything, 0, buffers=not idle, forced=True)

    def _sync_round(
        self, numbers: Sequence[int], delay: int, *, buffers: bool, forced: bool = False
    ) -> SyncRound:
        fragments = [self.fragments[number] for number in numbers]
        dense = dict(self.buffers) if buffers else {}
        if self.method.momentum == "average":
            for fragment in fragments:
                dense |= remembered(self.optimizers, fragment.pieces)
        step = self.clock.step
        which = [*numbers, *([-1] if forced else [])]
        sync_round = SyncRound(
            step,
            self.sync_rounds,
            which,
            fragments,
            dense,
            step + delay,
            self.clock.synced_before,
            self._digest(),
            self.spares,
        )
        self.sync_rounds += 1
        with torch.no_grad():
            sync_round.snapshot()
        return sync_round

    def _digest(self) -> int:
        """Of what is equal on all ranks; in the first sync round, after a load or failure, and every 64th."""
        if self._confirmed and self.sync_rounds % EVERY:
            return 0
        self._confirmed = True
        layouts = [layout for fragment in self.fragments for layout in fragment.layouts]
        common = [tensor for block in self.blocks for tensor in (block.anchor, block.velocity)]
        return digest_of([t for t in common if t is not None] + self.engine.replicated(layouts))

    async def _program(self, sync_round: SyncRound) -> None:
        for each in self.engine.executors:
            each.label = f"the sync round after step {sync_round.step}"
        await sync_round.prepare(self.rank_info, self.engine.link, self.blocks[0].layout.device)
        if sync_round.fragments:
            # Set here, where the lane begins: a later sync round may have been handed over meanwhile.
            self.engine.step = sync_round.number
            await self.engine.program(sync_round.views)

    def _sync_now(self, sync_round: SyncRound) -> None:
        self._wait_for_all()  # one thread at a time uses the group
        before = self.meter.total
        try:
            self.run(Timed(self._program(sync_round), self.meter))
        except BaseException:
            self._take_back(sync_round)
            raise
        self._announce(self.meter.total.minus(before))
        self._apply(sync_round)

    def _sync_in_background(self, sync_round: SyncRound) -> None:
        if self._lanes is None:
            raise ThinwireError("this session has been detached: the replicas are not synchronised any more")
        device = self.blocks[0].layout.device
        arrived, errors = future_for(device), list[BaseException]()

        def done(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            arrived.set_result(sync_round.changes[0])

        def wait() -> None:
            arrived.wait()
            if errors:
                raise errors[0]

        step = Step(lambda committed: None)
        program = Timed(self._program(sync_round), self.meter)
        self._lanes.submit(0, Job(program, step, done, device))
        step.close()
        self.under_way.append((sync_round, wait))

    async def _driven(self, sync_round: SyncRound) -> None:
        """Lock-step has no clock: a result is there at once, and still applied when it is due."""
        try:
            await self._program(sync_round)
        except BaseException:
            self._take_back(sync_round)
            raise
        if sync_round.late:
            self.under_way.append((sync_round, _arrived))
        else:
            self._apply(sync_round)

    def _apply_next(self) -> None:
        sync_round, wait = self.under_way[0]
        try:
            wait()
        except Exception:
            self._forget_failed()
            raise
        del self.under_way[0]
        self._apply(sync_round)

    def _wait_for_all(self) -> None:
        for _, wait in self.under_way:
            wait()

    def _forget_failed(self) -> None:
        """Wait for the sync rounds under way; from the first that failed on they have not taken place."""
        for position, (sync_round, wait) in enumerate(self.under_way):
            try:
                wait()
            except Exception as error:
                self._failure = error  # for the training loop, if it has not heard of it
                del self.under_way[position:]
                self._take_back(sync_round)
                return

    def _take_back(self, sync_round: SyncRound) -> None:
        """A sync round has failed. Its number is used again: a rank on which it succeeded is noticed."""
        self.sync_rounds = sync_round.number
        self.clock.synced = sync_round.synced
        self._confirmed = False

    @torch.no_grad()
    def _apply(self, sync_round: SyncRound) -> None:
        if sync_round.finite:
            outer = self.method.outer if sync_round.step > self.method.warmup else Outer()
            sync_round.apply(outer)
            sync_round.apply_dense()
            if self.method.momentum == "reset":
                self._forget_momenta(sync_round.fragments)
        else:
            self._abort(sync_round)
        sync_round.release()

    def _abort(self, sync_round: SyncRound) -> None:
        """All ranks go back to the last common model; they decide it from the same numbers.

        A rank goes back in every fragment that is not finite here: one such fragment makes all others
        non-finite in the next step.
        """
        self.aborted += 1
        for block in sync_round.blocks:
            block.write(block.anchor)
        begun = {id(block): own for other, _ in self.under_way for block, own in other.begun_with()}
        for block in self.blocks:
            if not is_finite(block.read()):
                own = begun.get(id(block), block.anchor)  # what its result, once it arrives, is added to
                block.write(own if is_finite(own) else block.anchor)
        self._forget_momenta(self.fragments, only_if_not_finite=True)
        if self.speaks:
            log.warning(
                "the sync round after step %d is aborted: a rank's parameters were not finite. All ranks go "
                "back to the model of the sync round before (%d aborted so far)",
                sync_round.step,
                self.aborted,
            )

    def _forget_momenta(self, fragments: Sequence[Fragment], *, only_if_not_finite: bool = False) -> None:
        """Where an optimizer goes on as if the parameters had never had a gradient."""
        for piece in (piece for fragment in fragments for piece in fragment.pieces):
            kept = remembered(self.optimizers, [piece]).values()
            if not only_if_not_finite or not all(map(is_finite, kept)):
                self.optimizers.forget(piece.parameter)

    def _announce(self, first: Tally) -> None:
        if self._announced or not self.speaks:
            return
        self._announced = True
        payload = first.payload_bytes + first.overhead_bytes
        steps = self.method.period / self.method.fragment_count
        log.info(
            "%s on %d ranks: each rank contributes %s bytes to a sync round, in %d %s, one every %g steps "
            "(%.3g %% of dense); between sync rounds the replicas differ",
            self.method,
            self.rank_info.size,
            f"{payload:,}",
            first.operations,
            "operation" if first.operations == 1 else "operations",
            steps,
            100 * payload / max(self.dense_bytes * steps, 1),
        )

    # -- checkpoints and the end -----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """A copy like `sealed()`, without the checksums that take most of its time.

        It holds the optimizer's state, anchors, outer momentum, counters, residuals, buffers, sync rounds
        under way, and the parameters that differ from the anchor.
        """
        self._forget_failed()
        return periodic_checkpoint.save(self)

    def load_sealed(self, states: Sequence[Mapping[str, Any]], on_resize: OnResize | None) -> None:
        """`load_state_dict` with what `sealed()` returned, of one or several ranks."""
        self._forget_failed()
        periodic_checkpoint.load(self, states, on_resize)
        self.optimizers.begin_anew()
        self._confirmed = False

    def detach(self) -> None:
        """Stop: no more sync rounds. The replicas stay as they are; `finish` synchronises them first."""
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None
        super().detach()


def check_parameters(
    parameters: Mapping[str, torch.Tensor], optimizers: Optimizers, method: Schedule
) -> None:
    """Refuse parameters that cannot be averaged, or that would drift apart unnoticed."""
    if not parameters:
        raise ConfigError("there are no parameters to average")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"{name!r} is {parameter.dtype}: {method.name} averages real floating-point numbers"
            )
        plain = type(parameter.data) is torch.Tensor or is_sharded(parameter)
        if parameter.is_sparse or not plain:
            raise ConfigError(
                f"{name!r} is a {type(parameter.data).__name__}: {method.name} averages plain dense tensors "
                "and the shards of FSDP2"
            )
    if not len(optimizers):
        raise ConfigError(
            f"{method.name} counts the optimizer's steps: give it, attach(model, {str(method)!r}, "
            "optimizer=optimizer)"
        )
    known = {id(parameter) for parameter in parameters.values()}
    trained = optimizers.parameters
    strange = [p for p in trained if id(p) not in known and p.requires_grad]
    if strange:
        shapes = ", ".join(str(tuple(p.shape)) for p in strange[:3])
        raise ConfigError(
            f"{len(strange)} tensors in {optimizers} are not the model's (shapes {shapes}): they would drift "
            "apart on the ranks; attach a model that contains all of them"
        )
    if not any(id(p) in known for p in trained):
        raise ConfigError(
            f"none of the model's parameters is in {optimizers}: was it made for another model?"
        )
    optimizers.check_all_held(parameters)


def _arrived() -> None:
    """Nothing to wait for."""


def _bytes(tensor: torch.Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def _described(name: str, tensor: torch.Tensor) -> list[Any]:
    return [name, list(local(tensor).shape), str(tensor.dtype).removeprefix("torch.")]
