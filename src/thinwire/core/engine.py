"""The engine under every session: plans, states, and the coroutine of each step.

Sessions are facades over an engine. Hosts and drivers call it: `begin_step`, `program` for each bucket (or
for all tensors), `end_step`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from thinwire import log
from thinwire.core import agreement
from thinwire.core.begun import Begun
from thinwire.core.channel import (
    Channel,
    Program,
    StepContext,
    ask,
    committed_by,
    free_views,
    mark_of,
    read,
    tell_all,
    together,
)
from thinwire.core.delay import Delay
from thinwire.core.exchange import Exchange, State
from thinwire.core.layout import Layout, Slot
from thinwire.core.measured_link import MeasuredLink, given_link
from thinwire.core.optimizers import LossScale, Optimizers
from thinwire.core.routing import Group, Router, View, plan
from thinwire.core.schema import is_finite
from thinwire.core.shards import is_first_shard, local
from thinwire.core.state import SavedState, StateStore
from thinwire.core.two_levels import hosts_of_groups, two_levels, within
from thinwire.errors import ConfigError, ThinwireError
from thinwire.net import estimate, frames
from thinwire.net.bulletin import Bulletin
from thinwire.net.costs import Link
from thinwire.net.executor import ProcessGroupExecutor
from thinwire.net.groups import private_groups
from thinwire.net.handshake import agree
from thinwire.net.meter import Meter, Tally, Timed
from thinwire.net.rank_info import Hosts, RankInfo
from thinwire.version import __version__


class Engine:
    """One method at work on one set of named tensors.

    Args:
        tensors: names and tensors; names, shapes and types must be equal on all ranks. Of a sharded tensor
            only this rank's shard counts.
        method: the exchange.
        dense: the exchange for tensors that are too small for the method.
        dense_below: tensors with fewer entries, and short vectors, count as small.
        seed: of the random numbers that the ranks share.
        scaler: the GradScaler in use, so that residuals follow its scale.
        optimizers: those in use, whose learning rate some methods need.
        link: the link by which the cheapest operations are chosen; None measures it.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        method: Exchange,
        *,
        dense: Exchange,
        dense_below: int = 1024,
        seed: int = 0,
        scaler: LossScale | None = None,
        optimizers: Optimizers | None = None,
        link: Link | None = None,
    ) -> None:
        self.method = method
        self.router = Router(method, dense, dense_below)
        self.seed = seed
        self.step = 0
        self.scale = 1.0
        given = given_link(link)
        self.link = given or Link()
        self.measured: MeasuredLink | None = None
        """Where the link comes from, if it is measured."""
        self.meter = Meter()
        self.states = StateStore()
        self.executors: list[ProcessGroupExecutor] = []
        self.rank_info = RankInfo(0, 1)
        self.hosts: Hosts | None = None  # of a method with two levels
        self.inner = dense  # its mean inside a host
        self.first_rank = 0  # of the process group, among all ranks
        self.parameters: dict[str, torch.Tensor] = {}
        self._slots: dict[str, tuple[Slot, torch.dtype]] = {}
        for name, tensor in tensors:
            if name in self._slots:
                raise ConfigError(f"two parameters have the name {name!r}")
            self.parameters[name] = tensor
            self._slots[name] = (Slot(name, tuple(local(tensor).shape), 0), tensor.dtype)
        if not self._slots:
            raise ConfigError("there are no parameters to average")
        self.exchanges = {self.router.exchange_for(slot) for slot, _ in self._slots.values()}
        stateless = all(exchange.traits.single_mean for exchange in self.exchanges)
        # A method with two levels, or with a delay, decides by the commit what it keeps.
        self.remembers = method.traits.two_levels or method.traits.delayed or not stateless
        self.delay = Delay(on=method.options().get("delay") != "auto") if method.traits.delayed else None
        self._measures = given is None and not stateless
        self._votes = False  # whether the next program is to bring a vote on the link
        self._position = {name: position for position, name in enumerate(self._slots)}
        self._scaler = scaler
        self._optimizers = optimizers or Optimizers()
        self._stale: Mapping[str, torch.Tensor] | None = None
        self._has_gradient = True
        self.confirms = self.remembers  # a session that compares its ranks itself turns this off
        self.cuts = True  # long operations into pieces; predictions, which count bytes, turn this off
        self.steps_here = 0  # since attach, aborted ones included: equal on all ranks whatever they load
        self._uncertain = True  # whether all ranks are at the same step
        self._last_layouts: list[Layout] = []
        self._layouts: dict[tuple[str, torch.device], Layout] = {}
        self._plans: dict[tuple[int, ...], tuple[list[Group], int, list[Layout]]] = {}
        self._lock = threading.Lock()
        self._scattered: list[bool | torch.Tensor] = []  # whether it was finite, in this step
        self._announced: list[Tally] = []  # what the first two steps sent
        self._before_step = Tally()
        self._bulletins = 0

    # -- the group -------------------------------------------------------------------------------------

    def open(
        self,
        process_group: dist.ProcessGroup | None,
        lanes: int = 1,
        inner_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create the private groups. The ranks compare their settings, lanes included, over the first one.

        `inner_group` has the ranks of this rank's host, for a method with two levels.
        """
        (first,) = private_groups(process_group, 1)
        self.executors = [ProcessGroupExecutor(first, self.meter)]
        ranks, rank_info = dist.get_process_group_ranks(first), RankInfo(first.rank(), first.size())
        try:
            unknown = None if inner_group is not None else self._resolve()
            source = "inner_group" if inner_group is not None else str(unknown or "the method")
            # Before a rank that does not know its host gives up: otherwise the others would wait for it.
            self.agree(self.describe() | {"hosts": source, "lanes": lanes})
            if unknown is not None:
                raise unknown
            self.place(rank_info, ranks, self._given_hosts(inner_group, rank_info, ranks))
            for group in private_groups(process_group, lanes - 1):
                self.executors.append(ProcessGroupExecutor(group, self.meter, first.group_name))
            if self.hosts is not None:
                for each in self.executors:
                    each.open_levels(self.hosts)
            self._begin_to_measure()
        except BaseException:
            self.close()
            raise
        self.meter.reset()
        self.first_rank = ranks[0]

    def _begin_to_measure(self) -> None:
        if not self._measures or self.rank_info.size == 1:
            return
        self.measured = MeasuredLink(self.exchange_ranks, speaks=self.speaks)
        for each in self.executors:
            each.sample(self.measured.samples)
        self.probe()

    def probe(self) -> None:
        """Measure the link, if it is not given; call it on every rank, between two steps."""
        if self.measured is not None:
            self.measured.begin(estimate.measure(self.executor.execute, self.rank_info))
            self.link = self.measured.link

    def _resolve(self) -> ConfigError | None:
        """Take options from the environment; returns the error if that is not possible."""
        try:
            self.method = self.method.resolved()
        except ConfigError as error:
            return error
        return None

    def _given_hosts(
        self, inner_group: dist.ProcessGroup | None, rank_info: RankInfo, ranks: Sequence[int]
    ) -> Hosts | None:
        if inner_group is None:
            return None
        if not self.method.traits.two_levels:
            raise ConfigError(f"inner_group is for hierarchical, not for {self.method}: leave it out")
        return hosts_of_groups(inner_group, rank_info, ranks, self.executor.execute)

    def place(
        self, rank_info: RankInfo, ranks: Sequence[int] | None = None, hosts: Hosts | None = None
    ) -> None:
        """This engine's rank; `ranks` are the numbers of its group's ranks in the world, if it is not all.

        `hosts` are those of given groups; None takes as many consecutive ranks as the method says.
        """
        self.rank_info = rank_info
        self.method = self.method.resolved(None if hosts is None else hosts.local)
        levels = self.method.levels
        if levels is not None:
            self.inner = levels.inner
            self.hosts = hosts or Hosts.of(rank_info, levels.local, ranks)

    @property
    def exchange_ranks(self) -> RankInfo:
        """The rank and size that exchanges see: with two levels, those of the leaders."""
        return self.rank_info if self.hosts is None else self.hosts.between

    @property
    def keeps_states(self) -> bool:
        """Whether exchanges run on this rank; with two levels they run on leaders only."""
        return self.hosts is None or self.hosts.leads

    def agree(self, description: dict[str, Any]) -> None:
        """Raise on every rank if the descriptions differ between ranks."""
        ranks = dist.get_process_group_ranks(self.executor.group)
        agree(description, self.executor.execute, ranks)

    def bulletin(self, what: str) -> Bulletin:
        """For words beside the collectives; every rank asks for it equally often, with the same `what`."""
        self._bulletins += 1
        name = f"{self.executor.group.group_name}/{self._bulletins}/{what}"
        return Bulletin(self.executor.group, name)

    @property
    def executor(self) -> ProcessGroupExecutor:
        """That of the first private group; an error if there is none."""
        if not self.executors:
            raise ThinwireError(
                "this session has no process group: it was detached, or it belongs to a driver, which runs "
                "its programs"
            )
        return self.executors[0]

    @property
    def speaks(self) -> bool:
        """Whether this rank logs for all: the first one, of a sharded model that with the first shards."""
        return self.rank_info.rank == 0 and all(map(is_first_shard, self.parameters.values()))

    def close(self) -> None:
        """Close the private groups."""
        executors, self.executors = self.executors, []
        for each in executors:
            each.close()

    def describe(self) -> dict[str, Any]:
        """This rank's settings, which must be equal on all ranks."""
        return {
            "thinwire version": __version__,
            "wire format": frames.VERSION,
            "method": str(self.method),
            "seed": self.seed,
            "dense_below": self.router.dense_below,
            "parameters": self.described_parameters(),
            "link": "measured" if self._measures else repr(self.link),
        }

    def described_parameters(self) -> list[list[Any]]:
        return [
            [name, list(slot.shape), str(dtype).removeprefix("torch.")]
            for name, (slot, dtype) in self._slots.items()
        ]

    # -- layouts and plans -----------------------------------------------------------------------------

    @property
    def dense_bytes(self) -> int:
        """The payload of an uncompressed step."""
        return sum(slot.numel * dtype.itemsize for slot, dtype in self._slots.values())

    def payload_bytes(self, layouts: Sequence[Layout] | None = None) -> int | None:
        """The payload of a step without frame headers, on the session's link; None if it depends on the data.

        For these layouts, or for the model as one bucket. If a method works per bucket, the payload under
        DDP may differ.
        """
        asked = list(layouts or (self._layout(name, torch.device("cpu")) for name in self._slots))
        groups = plan(asked, self.router, self._position)
        size = self.exchange_ranks.size
        promised = [group.exchange.payload_bytes(group.layout, size, self.link) for group in groups]
        return None if None in promised else sum(cast("list[int]", promised))

    def layout(self, names: Sequence[str], device: torch.device) -> Layout:
        """The layout of these parameters one after the other in one buffer."""
        dtype = self._slots[names[0]][1]
        return Layout.of(((name, self._slots[name][0].shape) for name in names), dtype, device)

    def checkpoint_layouts(self) -> dict[str, Layout]:
        """One layout for each parameter, without memory behind it."""
        return {name: self.layout([name], torch.device("meta")) for name in self._slots}

    def views(
        self, tensors: Mapping[str, torch.Tensor | None], *, in_place: bool = False
    ) -> tuple[dict[str, torch.Tensor], list[View]]:
        """Check the tensors to average, and prepare the memory for the results."""
        missing = [name for name in self._slots if name not in tensors]
        unknown = [name for name in tensors if name not in self._slots]
        if missing or unknown:
            what = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is not one of them"
            raise ConfigError(f"average() takes all {len(self._slots)} parameters of the session: {what}")
        results: dict[str, torch.Tensor] = {}
        views: list[View] = []
        for name, (slot, dtype) in self._slots.items():
            given = tensors[name]
            given = None if given is None else local(given)
            if given is None:
                x = torch.zeros(slot.shape, dtype=dtype)
            elif given.is_sparse or tuple(given.shape) != slot.shape or given.dtype != dtype:
                raise ConfigError(
                    f"{name!r} must be a dense {dtype} tensor of shape {slot.shape}, "
                    f"not {given.dtype} {tuple(given.shape)}{' sparse' if given.is_sparse else ''}"
                )
            else:
                x = given.detach()
            if in_place and given is not None and not x.is_contiguous():
                raise ConfigError(f"{name!r} is not contiguous: it cannot be averaged in place")
            out = x if in_place else torch.empty(x.shape, dtype=dtype, device=x.device)
            flat = x.contiguous().view(-1)
            views.append(View(self._layout(name, x.device), flat, flat if out is x else out.view(-1)))
            results[name] = out
        return results, views

    def _layout(self, name: str, device: torch.device) -> Layout:
        known = self._layouts.get((name, device))
        if known is None:
            known = self._layouts[name, device] = self.layout([name], device)
        return known

    def _plan(self, layouts: list[Layout]) -> tuple[list[Group], int]:
        """The plan for these layouts, and the mark of their payloads; looked up by identity."""
        key = tuple(map(id, layouts))
        known = self._plans.get(key)
        if known is None:
            names = [name for layout in layouts for name in layout.names]
            mark = mark_of("\n".join([str(self.method), *names]))
            # The layouts are kept with the plan, so that no other one can take their identity.
            known = self._plans[key] = (plan(layouts, self.router, self._position), mark, layouts)
        return known[0], known[1]

    # -- a step ----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Called before the first tensor of a step."""
        # Without a scaler the scale is 1 again, even if the checkpoint comes from a run that had one.
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if scale != self.scale:
            self.states.rescale(scale / self.scale)
            if self.delay is not None:
                self.delay.rescale(scale / self.scale)
            self.scale = scale
        for each in self.executors:
            each.label = f"step {self.meter.steps}"
        if len(self._announced) < 2:
            self._before_step = self.meter.total
        if self.measured is not None:
            self.link = self.measured.conclude(self.steps_here)
            self._votes = self.measured.is_due(self.steps_here)

    def program(self, views: Sequence[View]) -> Program:
        """The coroutine that averages these views on one rank, for a driver to run."""
        return Timed(self._program(views, self._is_first()), self.meter)

    def behind(self, views: Sequence[View]) -> Program:
        """The coroutine of a delayed step: it keeps the means for the next one, which `delay` hands out."""
        return Timed(self._keep(views, self._is_first()), self.meter)

    def confirmation(self, views: Sequence[View]) -> Program | None:
        """The round in which all ranks tell each other where they are; None if they know.

        For a step with a delay, which hands out means before its own program has run. Other programs bring
        the round themselves.
        """
        return Timed(self._confirmed(views), self.meter) if self._uncertain else None

    def reads_early(self, views: Sequence[View]) -> bool:
        """Whether `begun` does for these views, in the step that has begun."""
        in_time = self.hosts is None and not self._votes and not self._uncertain
        if not in_time or views[0].x.device.type != "cpu":
            return False
        return any(group.exchange.reads_early for group in self._plan([view.layout for view in views])[0])

    def begun(self, views: Sequence[View]) -> Begun:
        """The program of a delayed step, which has read the gradients; their memory is free.

        The outputs of the views are its own until the commit. Afterwards it waits for views to write to.
        """
        return Begun(Timed(self._exchange(views, late=True), self.meter))

    def _is_first(self) -> bool:
        """Whether this is the first program of a step with a vote: the same one on all ranks."""
        votes, self._votes = self._votes, False
        return votes

    def scatter_program(self, key: str, pieces: Sequence[torch.Tensor], out: torch.Tensor) -> Program:
        """The coroutine that gives each rank the mean of its own piece; `key` names the pieces.

        The results belong to an aborted step unless `scattered_finite` says at its end that they do not.
        """
        return Timed(self._scatter(key, pieces, out), self.meter)

    async def _scatter(self, key: str, pieces: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        small = out.numel() < self.router.dense_below
        exchange = self.router.dense if small else self.method
        ch = Channel(
            self.rank_info, step=self.step, seed=self.seed, key=key, device=out.device, link=self.link
        )
        narrowed = out.dtype == torch.float64 and not exchange.traits.elementwise
        target = torch.empty_like(out, dtype=torch.float32) if narrowed else out
        given = [piece.float() for piece in pieces] if narrowed else pieces
        if self.remembers and exchange.traits.single_mean:
            given = _all_or_none(given)

        async def reduce() -> None:
            finite = await exchange.reduce_scatter(given, target, ch)
            if self.remembers:
                finite = _finite_flag(target) if finite is None else finite
                target.masked_fill_(torch.as_tensor(finite, device=target.device).logical_not(), torch.nan)
                self._scattered.append(finite)

        mark = mark_of(f"{exchange}\n{key}")
        await together([reduce()], self.rank_info, step=self.step, mark=mark, link=self.link)
        if narrowed:
            out.copy_(target)

    def scattered_finite(self) -> bool:
        """Whether all that was scattered in this step was finite; equal on all ranks. The host waits once."""
        flags, self._scattered = self._scattered, []
        return all(read(flags))

    def end_step(self, committed: bool) -> None:
        """Called when every tensor of the step has been averaged; `committed` if all numbers were finite."""
        self.meter.count_step(skipped=not committed)
        self._stale = None
        self._has_gradient = True
        self.steps_here += 1
        self._uncertain = False
        # A method that remembers nothing has no use for a count, nor the data to commit it.
        if committed and self.remembers:
            self.step += 1
        if self.executors and len(self._announced) < 2:
            self._announced.append(self.meter.total.minus(self._before_step))
            if len(self._announced) == 2 and self.speaks:
                self._announce(*self._announced)

    async def _program(self, views: Sequence[View], votes: bool) -> None:
        if self.delay is None or not self.delay.on:
            await self._now(views, votes)
            return
        copies = [View(view.layout, x, x) for view in views for x in (view.x.clone(),)]
        before = self.delay.ready
        await self._keep(copies, votes)
        now, self.delay.ready = self.delay.ready, before
        self.delay.hand_out(views)
        self.delay.ready = now

    async def _keep(self, views: Sequence[View], votes: bool) -> None:
        step = self.step
        committed = await committed_by(self._now(views, votes))
        if self.delay is not None:
            self.delay.keep(step, views, committed)

    async def _now(self, views: Sequence[View], votes: bool) -> None:
        if self._uncertain:
            await self._confirm(views)
        if votes and self.measured is not None:
            await self.measured.vote(views[0].layout.device)
        if self.hosts is None:
            await self._exchange(views)
        else:
            await self._two_levels(views, self.hosts)

    async def _confirmed(self, views: Sequence[View]) -> None:
        await self._confirm(views)
        self._uncertain = False

    async def _confirm(self, views: Sequence[View]) -> None:
        """Ranks at different steps may take different operations: they find out before the first one."""
        if not self.confirms or self.rank_info.size == 1:
            return
        groups, device = self._plan([view.layout for view in views])[0], views[0].layout.device
        if self.hosts is None:
            await tell_all(self._note(groups), device)
            return
        await tell_all(agreement.Note(self.step, 0), device)
        if self.hosts.leads and self.exchange_ranks.size > 1:
            await within(tell_all(self._note(groups), device), self.hosts.leaders, inside=False)

    async def _two_levels(self, views: Sequence[View], hosts: Hosts) -> None:
        layouts = [view.layout for view in views]
        groups, mark = self._plan(layouts)
        self._last_layouts = layouts
        kept = [(state, state.copies()) for state in self._states_of(groups)] if hosts.leads else []
        committed = False
        try:
            finite = await two_levels(
                views, hosts, self.inner, self._exchange, step=self.step, mark=mark, link=self.link
            )
            # Leaders have changed their states, in order to have the result for their hosts; the step may
            # still be aborted, by other tensors or by a failed operation.
            committed = cast(bool, await ask(frames.Commit(finite)))
        finally:
            for state, copies in () if committed else kept:
                state.restore(copies)
        for view in () if committed else views:
            view.out.fill_(torch.nan)

    async def _exchange(self, views: Sequence[View], *, late: bool = False) -> None:
        layouts = [view.layout for view in views]
        groups, mark = self._plan(layouts)
        self._last_layouts = layouts
        tasks = [self._serve(group, views, late=late) for group in groups]
        await together(
            tasks,
            self.exchange_ranks,
            step=self.step,
            mark=mark,
            link=self.link,
            note=self._note(groups) if self._notes() else None,
            pads=bool(self.executors) and self.executors[0].pads,
            cuts=self.cuts,
        )

    def _notes(self) -> bool:
        """Whether this is one of the later steps in which the ranks confirm where they are."""
        due = self.steps_here > 0 and self.steps_here % agreement.EVERY == 0 and not self._uncertain
        return due and self.confirms and self.exchange_ranks.size > 1

    def _note(self, groups: Sequence[Group]) -> agreement.Note:
        """Where this rank is."""
        return agreement.Note(self.step, agreement.digest_of(self._replicated(groups)))

    def replicated(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """The tensors of these layouts' states that are equal on all ranks; none if only leaders have any."""
        return [] if self.hosts is not None else self._replicated(self._plan(list(layouts))[0])

    def _replicated(self, groups: Sequence[Group]) -> list[torch.Tensor]:
        states = self._states_of(groups)
        return [tensor for state in states for tensor in state.tensors("replicated").values()]

    def _states_of(self, groups: Sequence[Group]) -> list[State]:
        return [self.state(group.exchange, group.layout) for group in groups if not group.traits.single_mean]

    async def _serve(self, group: Group, views: Sequence[View], *, late: bool) -> None:
        """Run one exchange on its stretch of memory. If `late`, it reads at once and then waits for views."""
        exchange, traits, layout = group.exchange, group.traits, group.layout
        memory = group.memory(views)
        # Methods that code or select work in single precision, as their residuals do.
        narrowed = layout.dtype == torch.float64 and not traits.elementwise
        direct = len(memory) == 1 and not narrowed
        early = late and direct and exchange.reads_early and layout.dtype == torch.float32
        copied = late and not early
        ch = Channel(
            self.exchange_ranks,
            step=self.step,
            seed=self.seed,
            key=layout.key,
            device=layout.device,
            context=self._context(exchange, layout),
            link=self.link,
            late=(lambda given: group.memory(given)[0][1]) if early else None,
        )
        state = State() if traits.single_mean else self.state(exchange, layout)
        if direct:
            x, out = memory[0]
            if copied:  # of its own: the next step begins in this memory before these means are delivered
                x = out = x.clone()
        else:
            x = out = torch.cat([piece.float() if narrowed else piece for piece, _ in memory])
        await exchange.run(x, out, state, ch)
        if ch.finite is None and self.remembers:
            await ch.commit(_finite_flag(out))
        if ch.committed is False:  # whatever made it so: nobody shall step on a part of this step
            out.fill_(torch.nan)
        if copied:
            memory = group.memory(await free_views())
        if copied or not direct:
            position = 0
            for _, target in memory:
                target.copy_(out[position : position + target.numel()])
                position += target.numel()

    def _context(self, exchange: Exchange, layout: Layout) -> StepContext:
        if exchange.traits.optimizer != "plain SGD":
            return StepContext(self.scale)

        def flat(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            pieces = [local(tensors[name]).detach().reshape(-1).float() for name in layout.names]
            return torch.cat(pieces).to(layout.device)

        stale = None if self._stale is None else flat(self._stale)
        rate, current = self._learning_rate(), lambda: flat(self.parameters)
        return StepContext(self.scale, rate, stale, current, self._has_gradient)

    def _learning_rate(self) -> float:
        """The optimizer's learning rate, if it is known and the same for all parameters; otherwise 1."""
        rates = {float(group.get("lr", 1.0)) for group in self._optimizers.groups}
        return rates.pop() if len(rates) == 1 else 1.0

    def _announce(self, first: Tally, second: Tally) -> None:
        """The larger of both: lazy methods may skip the second, and DDP makes its buckets after the first."""
        payload = max(tally.payload_bytes + tally.overhead_bytes for tally in (first, second))
        operations = max(first.operations, second.operations)
        log.info(
            "%s on %d %s: each %s contributes %s%s bytes per step in %d %s, %.3g %% of dense's %s",
            self.method,
            self.rank_info.size,
            "rank" if self.rank_info.size == 1 else "ranks",
            "rank" if self.hosts is None else "host",
            "" if self.method.traits.payload == "fixed" else "up to ",
            f"{payload:,}",
            operations,
            "operation" if operations == 1 else "operations",
            100 * payload / max(self.dense_bytes, 1),
            f"{self.dense_bytes:,}",
        )

    # -- states ----------------------------------------------------------------------------------------

    @property
    def given_step(self) -> int | None:
        """The step whose means the optimizer has got last; None if a delay has given it zeros."""
        return self.step - 1 if self.delay is None or not self.delay.on else self.delay.given

    def state(self, exchange: Exchange, layout: Layout) -> State:
        with self._lock:
            return self.states.take(exchange, layout)

    def make_states(self, layouts: Sequence[Layout]) -> None:
        """Create the states of these layouts now instead of in their first exchange."""
        if self.keeps_states:
            self._states_of(self._plan(list(layouts))[0])

    def residuals(self) -> dict[str, torch.Tensor]:
        """The part of past gradients that has not been sent yet, by parameter."""
        found = self.states.residuals(self.router.exchange_for, self.checkpoint_layouts())
        if self.hosts is not None:
            found = {name: residual * self.hosts.local for name, residual in found.items()}
        return found if self.delay is None else self.delay.residuals(found)

    def replace_state(self, saved: SavedState, step: int, scale: float, counters: Mapping[str, Any]) -> None:
        self.states.load(saved)
        self.meter.load(counters)
        self._uncertain = True
        self.step = step
        self.scale = scale

    def wants_gradient(self) -> bool:
        """Whether the next step needs this rank's gradient; the first two do, while DDP makes its buckets."""
        model = self.method.traits.scope == "model" and self.delay is None
        if not model or self.steps_here < 2 or self.hosts is not None:
            return True
        return any(
            group.exchange.wants_gradient(
                self.state(group.exchange, group.layout), self._context(group.exchange, group.layout)
            )
            for group in self._plan(self._last_layouts)[0]
        )

    def views_without_gradient(self) -> list[View]:
        """For a step to which this rank brings no gradient: zeros in the layouts of the last step."""
        self._has_gradient = False
        zeros = [torch.zeros(each.numel, dtype=each.dtype, device=each.device) for each in self._last_layouts]
        return [View(layout, x, x) for layout, x in zip(self._last_layouts, zeros, strict=True)]

    def stale_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters at this rank's last upload, by name; the current ones if the method keeps none."""
        layouts = [self._layout(name, tensor.device) for name, tensor in self.parameters.items()]
        found = {name: tensor.detach().clone() for name, tensor in self.parameters.items()}
        for group in self._plan(layouts)[0]:
            stale = group.exchange.stale_parameters(self.state(group.exchange, group.layout))
            if stale is not None:
                for slot, part in zip(group.layout.slots, group.layout.parts(stale), strict=True):
                    found[slot.name].copy_(part.view(slot.shape))
        return found

    def use_stale_gradients(self, stale: Mapping[str, torch.Tensor]) -> None:
        """Give the next step the gradients of its batch at `stale_parameters()`."""
        for name, (slot, _) in self._slots.items():
            given = stale.get(name)
            if given is None or tuple(given.shape) != slot.shape:
                what = "is missing" if given is None else f"has shape {tuple(given.shape)}, not {slot.shape}"
                raise ConfigError(
                    f"the second gradients are for all parameters of the session: {name!r} {what}"
                )
        self._stale = stale


def _finite_flag(x: torch.Tensor) -> bool | torch.Tensor:
    """For a commit: on other devices than a CPU a tensor, which nobody waits for."""
    return is_finite(x) if x.device.type == "cpu" else x.isfinite().all()


def _all_or_none(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """These pieces for the ranks, or NaN if one of them is not finite: then all ranks hear of it."""
    finite = torch.cat(list(pieces)).isfinite().all()
    return [torch.where(finite, piece, torch.nan) for piece in pieces]
