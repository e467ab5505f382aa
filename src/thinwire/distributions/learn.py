"""Learn a distribution from samples that are spread over servers, in one call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from thinwire import log
from thinwire.core.channel import Channel, mark_of, together
from thinwire.core.requests import added
from thinwire.distributions.cells import QuantileCells
from thinwire.distributions.choose import Plan, plans, table_bits
from thinwire.distributions.finish import Estimate, fit_warning, fitted
from thinwire.distributions.protocol import I64, Additive, AnyProtocol, Messages, Norm, Sums, check_samples
from thinwire.distributions.rates import bound
from thinwire.distributions.spec import LearningSpec, Model, Network, Structure
from thinwire.distributions.tables import Board, ServerCounts
from thinwire.drivers.blocking import Blocking
from thinwire.errors import ConfigError, PayloadError
from thinwire.net import frames
from thinwire.net.costs import Link
from thinwire.net.executor import ProcessGroupExecutor
from thinwire.net.groups import private_groups
from thinwire.net.handshake import agree
from thinwire.net.meter import Meter
from thinwire.net.rank_info import RankInfo

Sent = Sequence[Messages | Sums]
LONGEST_PROBLEM = 4096
"""Bytes of the text in which a rank says what is wrong with its samples."""


@dataclass(frozen=True)
class Turn:
    """Only these servers write, and they have read this."""

    servers: Sequence[int]
    board: Board


Collect = Callable[[AnyProtocol, I64, Turn | None], Awaitable[Sent]]
"""Every server encodes so many of its samples; returns what all of them sent."""


def learn(
    samples: Any,
    domain: int,
    bits: float = 8.0,
    structure: Structure = "none",
    pieces: int | None = None,
    norm: Norm = "l1",
    process_group: dist.ProcessGroup | None = None,
    *,
    epsilon: float | None = None,
    increasing: bool = False,
    seed: int = 0,
    network: Network | None = None,
    model: Model = "blackboard",
    rng: np.random.Generator | None = None,
) -> Estimate:
    """The distribution that the samples come from, by the protocol with the smallest expected error.

        learn(shards, 4096, bits=4).p                       # a list of arrays: one process plays all servers
        learn(mine, 4096, bits=4, process_group=group).p    # under torch.distributed: every rank calls it

    Args:
        samples: whole numbers in 0..domain - 1. A list or tuple of arrays: the shards of as many servers, all
            here. One array (or tensor): this rank's shard if torch.distributed is initialised, else
            all there is.
        domain: how many symbols there are.
        bits: what a server may send for each sample it has; less than one is possible.
        structure: what is known of p: "none", "monotone" or "histogram" (piecewise constant).
        pieces: of the histogram.
        norm: the error to keep small.
        process_group: the ranks to learn from; None is the default group.
        epsilon: if given, messages are epsilon-locally private.
        increasing: a monotone p rises instead of falling.
        seed: of what is public and random; equal on all ranks.
        network: what a table that all servers add up costs: "referee" (each sends it once: the default for a
            list of shards) or "ring" (an all-reduce: the default on ranks).
        model: what a server may have read before it writes: "simultaneous" (nothing), "one-way" (what
            servers before it wrote) or "blackboard" (all that was written in rounds before).
        rng: tosses private coins; from the operating system if None.

    Samples outside the domain, an empty shard, settings that differ: an error on every rank.
    """
    shards = isinstance(samples, list | tuple) and not _is_flat(cast("Sequence[Any]", samples))
    on_ranks = not shards and dist.is_available() and dist.is_initialized()
    if process_group is not None and not on_ranks:
        raise ConfigError("with a process group each rank gives one array, its own shard, not a list of them")
    network = network or ("ring" if on_ranks else "referee")
    spec = LearningSpec(domain, bits, structure, pieces, norm, epsilon, increasing, seed, network, model)
    if on_ranks:
        return _on_ranks(samples, spec, process_group, rng)
    return _in_one_process(cast("Sequence[Any]", samples) if shards else [samples], spec, rng)


async def learning(
    samples: Any,
    spec: LearningSpec,
    rank_info: RankInfo,
    result: list[Estimate],
    rng: np.random.Generator | None = None,
) -> None:
    """What one rank does to learn: a coroutine for a driver; appends the estimate to `result`."""
    ranks = _Ranks(spec, rank_info, rng)
    sizes = await ranks.load(samples)
    result.append(await _learn(spec, sizes, ranks.collect))


def _is_flat(samples: Sequence[Any]) -> bool:
    return bool(samples) and all(isinstance(sample, int | np.integer) for sample in samples)


# -- the rounds, wherever the servers are ------------------------------------------------------------------


async def _learn(spec: LearningSpec, sizes: I64, collect: Collect) -> Estimate:
    ranked = plans(spec, sizes)
    plan = ranked[0]
    protocol, n, bits = plan.protocol, int(plan.quota.sum()), 0
    if isinstance(protocol, ServerCounts):
        messages = await _written(protocol, sizes, collect)
        bits = 8 * sum(part.payload.size for part in messages)
    else:
        if isinstance(protocol, QuantileCells):
            quota = _spread(protocol.pilot_samples, sizes)
            pilot = protocol.pilot
            bits += int(quota.sum()) * pilot.bits_per_message
            first = cast("Sequence[Messages]", await collect(pilot, quota, None))
            protocol = protocol.refine(pilot.estimate(first))
        messages = await collect(protocol, plan.quota, None)
        bits += protocol.bits_per_message * (len(sizes) if isinstance(protocol, Additive) else n)
    p, error, misfit = fitted(spec, protocol, messages, n, plan.predicted)
    warnings = fit_warning(spec, misfit, plan.predicted)
    least = bound(spec, sizes)
    reason = _reason(spec, ranked, sizes, least)
    return Estimate(p, error, misfit, spec.norm, bits, protocol, reason, least, warnings=warnings)


async def _written(protocol: ServerCounts, sizes: I64, collect: Collect) -> list[Messages]:
    """All that the servers write, turn after turn."""
    board, written = Board(protocol.domain), list[Messages]()
    for servers in protocol.turns():
        now = cast("Sequence[Messages]", await collect(protocol, sizes, Turn(servers, board)))
        protocol.read(board, now)
        written += now
    return written


def _spread(total: int, sizes: I64) -> I64:
    """`total` samples over the shards, in proportion, and at least one of each."""
    share = np.floor(sizes * (total / int(sizes.sum()))).astype(np.int64)
    return np.minimum(sizes, np.maximum(share, 1))


def _reason(spec: LearningSpec, ranked: Sequence[Plan], sizes: I64, least: float) -> str:
    best = ranked[0]
    text = f"{best.protocol}: expected {spec.norm} error {best.predicted:.3g} for {best.bits:,} bits"
    if best.rounds > 1:
        text += f" in {best.rounds} rounds"
    text += f" (minimax rate, up to a constant: {least:.2g})"
    others = [plan for plan in ranked[1:] if type(plan.protocol) is not type(best.protocol)]
    if others:
        text += f"; next is {others[0].protocol} with {others[0].predicted:.3g}"
    if spec.epsilon is None:
        needed, room = 32 * spec.domain, table_bits(spec, sizes)
        fit = "fit" if needed <= room else "do not fit"
        text += f"; exact counts take {needed:,} bits per server and {fit} into {room:,.0f} ({spec.network})"
    return text


def subsample(samples: Any, quota: int, spec: LearningSpec, server: int) -> Any:
    """`quota` samples of a server, picked at random; the same wherever the server runs."""
    if quota == len(samples):
        return samples
    rng = np.random.default_rng([spec.seed, server])
    return samples[rng.choice(len(samples), quota, replace=False)]


# -- one process --------------------------------------------------------------------------------------------


def _in_one_process(shards: Sequence[Any], spec: LearningSpec, rng: np.random.Generator | None) -> Estimate:
    if not shards:
        raise ConfigError("there are no shards to learn from")
    checked: list[Any] = []
    for number, shard in enumerate(shards):
        try:
            checked.append(check_samples(shard, spec.domain))
        except ConfigError as error:
            raise ConfigError(f"shard {number}: {error}") from None
    sizes = np.array([len(shard) for shard in checked], np.int64)

    async def collect(protocol: AnyProtocol, quota: I64, turn: Turn | None) -> Sent:
        if turn is not None and isinstance(protocol, ServerCounts):
            return [protocol.encode(checked[server], rng, server, turn.board) for server in turn.servers]
        # Players are numbered over all shards, and tables add up: one shard or many makes no difference.
        parts = [
            subsample(s, int(q), spec, i) for i, (s, q) in enumerate(zip(checked, quota, strict=True)) if q
        ]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return [protocol.encode(joined, rng)]

    return _warned(_result_of(_learn(spec, sizes, collect)))


def _result_of(coroutine: Any) -> Estimate:
    """Of a coroutine that waits for nobody."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(Estimate, done.value)
    raise AssertionError("a coroutine of one process waits for another")


def _warned(estimate: Estimate) -> Estimate:
    for warning in estimate.warnings:
        log.warning("%s", warning)
    return estimate


# -- ranks --------------------------------------------------------------------------------------------------


def _on_ranks(
    samples: Any, spec: LearningSpec, group: dist.ProcessGroup | None, rng: np.random.Generator | None
) -> Estimate:
    (private,) = private_groups(group, 1)
    meter = Meter()
    network = ProcessGroupExecutor(private, meter)
    try:
        agree(spec.describe(), network.execute, dist.get_process_group_ranks(private))
        result: list[Estimate] = []
        Blocking(network.execute).run(learning(samples, spec, network.rank_info, result, rng))
    finally:
        network.close()
    estimate = replace(result[0], wire_bytes=meter.sent_bytes + meter.received_bytes)
    return _warned(estimate) if network.rank_info.rank == 0 else estimate


class _Ranks:
    """The servers are the ranks of a group; every rank is a referee."""

    def __init__(self, spec: LearningSpec, rank_info: RankInfo, rng: np.random.Generator | None) -> None:
        self.spec = spec
        self.rank_info = rank_info
        self.rng = rng
        self.samples: Any = None

    async def load(self, samples: Any) -> I64:
        """Check this rank's samples; returns how many each rank has. Bad ones are an error on all ranks."""
        problem, count = b" ", 0
        try:
            self.samples = check_samples(samples, self.spec.domain)
            count = len(self.samples)
        except ConfigError as error:
            problem = str(error).encode()[:LONGEST_PROBLEM]
        parts = [torch.tensor([count]), torch.frombuffer(bytearray(problem), dtype=torch.uint8)]
        sizes: list[int] = []
        problems: list[str] = []
        for rank, (theirs, text) in enumerate(await self._gather(parts, [1, LONGEST_PROBLEM])):
            if theirs.numel() != 1 or not 0 <= int(theirs[0]) < 2**48:
                raise PayloadError(f"rank {rank} does not say how many samples it has")
            sizes.append(int(theirs[0]))
            reported = frames.to_bytes(text).decode(errors="replace").strip()
            if reported or not sizes[-1]:
                problems.append(f"rank {rank}: {reported}")
        if problems:
            raise ConfigError("; ".join(problems))
        return np.array(sizes, np.int64)

    async def collect(self, protocol: AnyProtocol, quota: I64, turn: Turn | None) -> Sent:
        if turn is not None and isinstance(protocol, ServerCounts):
            return await self._take_turn(protocol, quota, turn)
        rank, firsts = self.rank_info.rank, np.cumsum(quota) - quota
        sent: Messages | Sums | None = None
        if quota[rank]:
            own = subsample(self.samples, int(quota[rank]), self.spec, rank)
            sent = protocol.encode(own, self.rng, int(firsts[rank]))
        if isinstance(protocol, Additive):
            table = sent.table if isinstance(sent, Sums) else protocol.empty()
            flat = torch.from_numpy(np.ascontiguousarray(table)).view(-1)
            return [Sums((await added(flat)).numpy().reshape(table.shape), int(quota.sum()))]
        payload = sent.payload if isinstance(sent, Messages) else np.empty(0, np.uint8)
        longest = (protocol.bits_per_message * int(quota.max()) + 7) // 8
        received = await self._gather([torch.from_numpy(payload)], [longest])
        return [
            Messages(theirs.numpy(), int(count), int(first))
            for (theirs,), count, first in zip(received, quota, firsts, strict=True)
        ]

    async def _take_turn(self, protocol: ServerCounts, sizes: I64, turn: Turn) -> list[Messages]:
        rank, payload = self.rank_info.rank, np.empty(0, np.uint8)
        if rank in turn.servers:
            payload = protocol.encode(self.samples, self.rng, rank, turn.board).payload
        found: list[Messages] = []
        longest = [protocol.longest(int(sizes.max()))]
        for server, (theirs,) in enumerate(await self._gather([torch.from_numpy(payload)], longest)):
            if server in turn.servers:
                found.append(Messages(theirs.numpy(), int(sizes[server]), server))
            elif theirs.numel():
                raise PayloadError(f"rank {server} writes when it is not its turn")
        return found

    async def _gather(
        self, parts: Sequence[torch.Tensor], longest: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        found: list[list[list[torch.Tensor]]] = []

        async def task(ch: Channel) -> None:
            found.append(await ch.gather(parts, longest=longest))

        ch = Channel(
            self.rank_info, step=0, seed=self.spec.seed, key="", device=torch.device("cpu"), link=Link()
        )
        mark = mark_of(repr(self.spec))
        await together([task(ch)], self.rank_info, step=0, mark=mark, link=Link())
        return found[0]
