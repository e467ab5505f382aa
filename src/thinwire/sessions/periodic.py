"""A schedule at work on a model: local steps are counted, meetings take place, and all of it can be saved."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from thinwire.averaging.base import Schedule
from thinwire.averaging.clock import Clock
from thinwire.averaging.fragments import Block, Fragment, cut, master_dtype
from thinwire.averaging.sync_round import NOTE_BYTES, Meeting, OptimizerMemory
from thinwire.core.channel import Channel, Program, context_of, together
from thinwire.core.layout import Layout
from thinwire.drivers.blocking import Blocking
from thinwire.drivers.lanes import Job, Lanes, Step
from thinwire.drivers.streams import LaneStreams, future_for
from thinwire.errors import ConfigError, ThinwireError
from thinwire.log import tell, warn
from thinwire.net.costs import Link
from thinwire.net.frames import Primitive
from thinwire.net.handshake import agree
from thinwire.net.link import Links
from thinwire.net.meter import Meter, Tally, Worked
from thinwire.net.rank_info import RankInfo
from thinwire.sessions import periodic_checkpoint as saved
from thinwire.sessions.checkpoint import OnResize
from thinwire.sessions.gradient import Session
from thinwire.sessions.replicas import Replicas


class PeriodicSession:
    """Local steps on every rank, and meetings of the replicas as the schedule says.

    `thinwire.attach(model, "pqasgd(every=8)", optimizer=optimizer)` makes one and has it called after every
    `optimizer.step()`. It has what a `Session` has: `method`, `meter`, `step`, `place`, `state_dict`,
    `load_state_dict`, `detach`.

    Between meetings the replicas differ. `sync()` makes them meet now, `common_model()` shows the last
    common model without any communication.

    Args:
        model: this rank's replica; a DistributedDataParallel wrapper has been taken off.
        method: the schedule.
        optimizer: what takes the local steps.
        process_group: the ranks to meet; None is the default group.
        seed: of the randomness that the ranks share.
        dense_below: tensors with fewer entries, and short vectors, travel dense; 0 compresses all.
        place: only for ranks run by the Lockstep or Simulated driver: which rank this is. The models must
            be equal to begin with, and `advance` and `sync_program` give what the driver runs.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Schedule,
        optimizer: torch.optim.Optimizer,
        process_group: dist.ProcessGroup | None = None,
        *,
        seed: int = 0,
        dense_below: int = 1024,
        rank_info: RankInfo | None = None,
        link: Link | None = None,
    ) -> None:
        self.method = method
        self.optimizer = optimizer
        self.dropped = 0
        self.meetings = 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        check_parameters(self.parameters, optimizer, method)
        self._model = model
        self._memory = OptimizerMemory(optimizer)
        self._replicas = Replicas(self.parameters, None)
        self.clock = Clock(method, seed)
        self.fragments = self._cut()
        self.exchanges = Session(
            self._anchors(),
            method.inner,
            process_group,
            seed=seed,
            dense_below=dense_below,
            rank_info=rank_info,
            link=link,
        )
        for fragment in self.fragments:
            self.exchanges.remember(fragment.layouts)
        self.under_way: list[tuple[Meeting, Callable[[], None]]] = []
        self._streams = LaneStreams()
        self._lanes: Lanes | None = None
        self._on_detach: list[Callable[[], None]] = []
        self._announced = False
        if self.exchanges.executors:
            try:
                self._begin()
            except BaseException:
                self.detach()
                raise

    def _cut(self) -> list[Fragment]:
        return cut(
            self.parameters,
            self.method.fragment_count,
            whole_tensors=self.method.whole_tensors,
            anchor_device=torch.device("cpu") if self.method.anchor == "cpu" else None,
            velocity=self.method.outer.momentum > 0,
        )

    def _anchors(self) -> list[tuple[str, torch.Tensor]]:
        """By name, shaped as what they belong to: views of the fragments' memory."""
        return [
            (slot.name, part.view(slot.shape))
            for block in self.blocks
            for slot, part in zip(block.layout.slots, block.layout.parts(block.anchor), strict=True)
        ]

    def _begin(self) -> None:
        """Agree on what the exchanges do not know of, and start from rank 0's model, as DDP does."""
        ranks = dist.get_process_group_ranks(self.exchanges.executors[0].group)
        agree(self.describe(), self.exchanges.executors[0].execute, ranks)
        Blocking(self.exchanges.executors[0].execute).run(self._spread_model())
        for block in self.blocks:
            block.drop_anchor()
        self.meter.reset()
        if self.method.late:
            self._lanes = Lanes(self.exchanges.executors, overlap=True)

    async def _spread_model(self) -> None:
        for tensors in _portions([*self._model.parameters(), *self._model.buffers()]):
            ch = Channel(self.rank_info, step=0, seed=0, key="", device=tensors[0].device)
            task, context = _from_first_rank(tensors, ch), context_of("thinwire model")
            await together([task], self.rank_info, step=0, context=context, link=self.exchanges.link)

    # -- what it is ------------------------------------------------------------------------------------

    @property
    def blocks(self) -> list[Block]:
        return [block for fragment in self.fragments for block in fragment.blocks]

    @property
    def rank_info(self) -> RankInfo:
        return self.exchanges.rank_info

    @property
    def meter(self) -> Meter:
        """Its `steps` are optimizer steps, so that bytes a step compare with those of other methods."""
        return self.exchanges.meter

    @property
    def seed(self) -> int:
        return self.exchanges.seed

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.clock.step

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers that are averaged."""
        if not self.method.buffers:
            return {}
        found = self.all_buffers
        return {name: buffer for name, buffer in found.items() if buffer.is_floating_point()}

    @property
    def all_buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._model.named_buffers())

    def describe(self) -> dict[str, Any]:
        """How this rank is set up: what all ranks must agree on, beside what the exchanges compare."""
        return {
            "schedule": repr(self.method),
            "optimizer": type(self.optimizer).__name__,
            "buffers": [_described(name, buffer) for name, buffer in self.all_buffers.items()],
            "parameters": [_described(name, parameter) for name, parameter in self.parameters.items()],
        }

    @property
    def dense_bytes(self) -> int:
        """What one step of plain data-parallel training would hand over."""
        return sum(p.numel() * p.element_size() for p in self.parameters.values())

    def cycle_bytes(self) -> int | None:
        """Payload of a whole cycle, if it does not depend on the data: every fragment meets once."""
        total = sum(_bytes(buffer) for buffer in self.buffers.values())
        for fragment in self.fragments:
            promised = self.exchanges.payload_bytes(fragment.layouts)
            if promised is None:
                return None
            total += promised + NOTE_BYTES
            if self.method.momentum == "average":
                total += sum(_bytes(kept) for kept in self._memory.tensors(fragment.pieces).values())
        return total

    def payload_bytes(self, layouts: Sequence[Layout] | None = None) -> float | None:
        """The same for each step, after the warm-up and before cycles grow; or these layouts' part of it."""
        total = self.cycle_bytes() if layouts is None else self.exchanges.payload_bytes(layouts)
        return None if total is None else total / self.method.period

    def layout(self, names: Sequence[str], device: torch.device) -> Layout:
        """The layout of these parameters one after the other in one buffer."""
        dtype = master_dtype(self.parameters[names[0]].dtype)
        return Layout.of(((name, tuple(self.parameters[name].shape)) for name in names), dtype, device)

    def pending(self) -> dict[str, torch.Tensor]:
        """What this rank still owes the mean, by parameter (or stretch of one): see `Session.pending`."""
        return self.exchanges.pending()

    def spread(self) -> float:
        """How far apart the replicas are: the largest distance from the mean, relative to its norm.

        Costs one dense mean of the parameters. To be called on every rank; the answer is equal on all.
        """
        self._wait_for_all()
        result: list[float] = []
        program = self._replicas.spread(self.rank_info, self.step, self.exchanges.link, result)
        Blocking(self._execute).run(program)
        return result[0]

    # -- steps -----------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Called by the host after every optimizer step; the replicas meet if it is time."""
        meeting = self._count()
        if meeting is None:
            return
        if meeting.due == meeting.step:
            self._meet_now(meeting)
        else:
            self._meet_meanwhile(meeting)

    def advance(self) -> Program | None:
        """For a driver: counts a step; what this rank does to meet the others, if it is time.

        To be called after every optimizer step; run the programs of all ranks together.
        """
        meeting = self._count()
        return None if meeting is None else self._driven(meeting)

    def sync(self) -> None:
        """Make the replicas meet now: all fragments, whatever the schedule says. A new cycle begins.

        To be called on every rank after the same step. Afterwards all parameters are equal to the last bit.
        Nothing travels but a note if they are equal already.
        """
        self._meet_now(self._forced())

    def sync_program(self) -> Program:
        """For a driver: what one rank does to `sync`."""
        return self._driven(self._forced())

    def finish(self) -> None:
        """`sync()` and `detach()`: to be called on every rank after the last step."""
        self.sync()
        self.detach()

    @property
    def reconcile_every(self) -> int:
        return self.method.period

    def reconcile(self) -> None:
        """The name that `Session` has for `sync`."""
        self.sync()

    def common_parameters(self) -> dict[str, torch.Tensor]:
        """The last common model, by parameter (or stretch of one, where tensors are cut): views to read."""
        return dict(self._anchors())

    @contextmanager
    def common_model(self) -> Generator[None, None, None]:
        """The parameters of the last common model (the anchor) for the time being; nothing travels.

        To evaluate between meetings what all ranks agree on. Take no optimizer step inside.
        """
        own = [block.read() for block in self.blocks]
        try:
            for block in self.blocks:
                block.write(block.anchor)
            yield
        finally:
            for block, values in zip(self.blocks, own, strict=True):
                block.write(values)

    # -- meetings --------------------------------------------------------------------------------------

    def _count(self) -> Meeting | None:
        self.meter.count_step()
        due, late, ends = self.clock.tick()
        while self.under_way and self.under_way[0][0].due <= self.clock.step:
            self._apply_next()
        return self._meeting(due, late, buffers=ends) if due else None

    def _forced(self) -> Meeting:
        everything = range(len(self.fragments))
        idle = self.clock.all_met
        while self.under_way:
            self._apply_next()
        self.clock.restart()
        return self._meeting([] if idle else everything, 0, buffers=not idle, forced=True)

    def _meeting(self, numbers: Sequence[int], late: int, *, buffers: bool, forced: bool = False) -> Meeting:
        fragments = [self.fragments[number] for number in numbers]
        beside = dict(self.buffers) if buffers else {}
        if self.method.momentum == "average":
            for fragment in fragments:
                beside |= self._memory.tensors(fragment.pieces)
        step = self.clock.step
        meeting = Meeting(
            step, self.meetings, [*numbers, *([-1] if forced else [])], fragments, beside, step + late
        )
        self.meetings += 1
        with torch.no_grad():
            meeting.snapshot()
        return meeting

    async def _program(self, meeting: Meeting) -> None:
        for each in self.exchanges.executors:
            each.label = f"the meeting after step {meeting.step}"
        await meeting.prepare(self.rank_info, self.exchanges.link, self.blocks[0].layout.device)
        if meeting.fragments:
            # Set here, where the lane begins: a later meeting may have been handed over meanwhile.
            self.exchanges.step = meeting.number
            await self.exchanges.program(meeting.views)

    def _meet_now(self, meeting: Meeting) -> None:
        self._wait_for_all()  # one thread at a time uses the group
        before = self.meter.total
        Blocking(self._execute).run(Worked(self._program(meeting), self.meter))
        self._announce(self.meter.total.minus(before))
        self._apply(meeting)

    def _meet_meanwhile(self, meeting: Meeting) -> None:
        if self._lanes is None:
            raise ThinwireError("this session has been detached: no replica meets any more")
        device = self.blocks[0].layout.device
        arrived, errors = future_for(device), list[BaseException]()

        def done(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            arrived.set_result(meeting.changes[0])

        def wait() -> None:
            arrived.wait()
            if errors:
                raise errors[0]

        step = Step(lambda kept: None)
        program = Worked(self._program(meeting), self.meter)
        self._lanes.submit(0, Job(program, step, done, self._streams.scope(0, device)))
        step.close()
        self.under_way.append((meeting, wait))

    async def _driven(self, meeting: Meeting) -> None:
        """Lock-step knows no time: a late result is there at once, and still applied late."""
        await self._program(meeting)
        if meeting.due == meeting.step:
            self._apply(meeting)
        else:
            self.under_way.append((meeting, _arrived))

    def _apply_next(self) -> None:
        meeting, wait = self.under_way[0]
        wait()
        del self.under_way[0]
        self._apply(meeting)

    def _wait_for_all(self) -> None:
        for _, wait in self.under_way:
            wait()

    @torch.no_grad()
    def _apply(self, meeting: Meeting) -> None:
        pieces = [piece for fragment in meeting.fragments for piece in fragment.pieces]
        if not meeting.finite:
            self._drop(meeting)
            return
        share = self.method.local_share if meeting.due > meeting.step else 0.0
        for block, mean in meeting.results():
            block.apply(mean, self.method.outer, share)
        meeting.apply_beside()
        if self.method.momentum == "reset":
            self._memory.forget(pieces)

    def _drop(self, meeting: Meeting) -> None:
        """Everybody goes back to the last common model; all find this from the same numbers."""
        self.dropped += 1
        for block, _ in meeting.results():
            block.write(block.anchor)
            self._memory.forget(block.pieces, only_if_not_finite=True)
        if self.rank_info.rank == 0:
            warn(
                "the meeting after step %d is dropped: a rank's parameters were not finite. All ranks go "
                "back to the model of the meeting before (%d dropped so far)",
                meeting.step,
                self.dropped,
            )

    def _execute(self, op: Primitive) -> object:
        if not self.exchanges.executors:
            raise ThinwireError(
                "this session has no process group: it was detached, or it belongs to a driver, which runs "
                "advance() and sync_program()"
            )
        return self.exchanges.executors[0].execute(op)

    def _announce(self, first: Tally) -> None:
        if self._announced or self.rank_info.rank != 0:
            return
        self._announced = True
        payload = first.payload_bytes + first.overhead_bytes
        steps = self.method.period / self.method.fragment_count
        tell(
            "%s on %d ranks: a meeting has a payload of %s bytes and %d rounds, one every %g steps (%.3g %% "
            "of dense steps); between them the replicas differ",
            self.method,
            self.rank_info.size,
            f"{payload:,}",
            first.operations,
            steps,
            100 * payload / max(self.dense_bytes * steps, 1),
        )

    def throttle(self, links: str | Links, *, seed: int = 0) -> None:
        """Let the meetings take as long as on this link: see `Session.throttle`."""
        self.exchanges.throttle(links, seed=seed)

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank must remember to go on bit for bit: tensors, numbers and strings only.

        One per rank, with the optimizer's state, anchors, outer momentum, counters, residuals, buffers, and
        the parameters where they differ from the anchor. Loads with `torch.load(..., weights_only=True)`.
        """
        self._wait_for_all()
        return saved.save(self)

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        on_resize: OnResize | None = None,
    ) -> None:
        """Go on from a `state_dict` of this rank: parameters, buffers and the optimizer's state are set, too.

        With another world size see `Session.load_state_dict`; what the old ranks have done since they last
        met has no place then: call `sync()` before the checkpoint is written, or say `on_resize="drop"`.
        """
        self._wait_for_all()
        saved.load(self, state, on_resize)

    # -- the end ---------------------------------------------------------------------------------------

    def on_detach(self, hook: Callable[[], None]) -> None:
        self._on_detach.append(hook)

    def detach(self) -> None:
        """Stop: no replica meets any more, the optimizer's hook is taken off, private groups are closed.

        To be called on every rank. Afterwards the session can still be read and saved.
        """
        hooks, self._on_detach = self._on_detach, []
        for hook in hooks:
            hook()
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None
        self.exchanges.detach()


def check_parameters(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, method: Schedule
) -> None:
    """What cannot be averaged, or would drift apart unnoticed."""
    if not parameters:
        raise ConfigError("there are no parameters to average")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"{name!r} is {parameter.dtype}: {method.name} averages real floating-point numbers"
            )
        if parameter.is_sparse or type(parameter.data) is not torch.Tensor:
            raise ConfigError(
                f"{name!r} is a {type(parameter.data).__name__}, not a plain dense tensor: {method.name} "
                "needs a whole replica on every rank, not a sharded one"
            )
    known = {id(parameter) for parameter in parameters.values()}
    trained = [p for group in optimizer.param_groups for p in cast("list[torch.Tensor]", group["params"])]
    strange = [p for p in trained if id(p) not in known and p.requires_grad]
    if strange:
        shapes = ", ".join(str(tuple(p.shape)) for p in strange[:3])
        raise ConfigError(
            f"the optimizer trains {len(strange)} tensors that are not the model's (shapes {shapes}): they "
            "would drift apart on the ranks; attach a model that contains all of them"
        )
    if not any(id(p) in known for p in trained):
        raise ConfigError(
            "the optimizer trains none of the model's parameters: was it made for another model?"
        )


def _arrived() -> None:
    """Nothing to wait for."""


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _described(name: str, tensor: torch.Tensor) -> list[Any]:
    return [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


PORTION_BYTES = 64 * 2**20


def _portions(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Of one device and not much more than a portion each; what has no entries is left out."""
    portions: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        if room < _bytes(tensor) or portions[-1][0].device != tensor.device:
            portions.append([])
            room = PORTION_BYTES
        portions[-1].append(tensor.detach())
        room -= _bytes(tensor)
    return portions


async def _from_first_rank(tensors: Sequence[torch.Tensor], ch: Channel) -> None:
    for tensor, values in zip(tensors, await ch.broadcast(tensors, 0), strict=True):
        tensor.copy_(values.view(tensor.shape))
