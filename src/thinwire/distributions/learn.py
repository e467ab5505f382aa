"""Learn a distribution from samples that are spread over servers: one call, one answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from thinwire import log
from thinwire.core.channel import Channel, Program, mark_of, together
from thinwire.core.requests import added
from thinwire.distributions.cells import QuantileCells
from thinwire.distributions.choose import Plan, plans, table_bits
from thinwire.distributions.finish import Estimate, fit_warning, fitted
from thinwire.distributions.protocol import (
    I64,
    Additive,
    AnyProtocol,
    Messages,
    Norm,
    Sums,
    check_samples,
    encode,
    estimate,
)
from thinwire.distributions.question import Network, Question, Structure
from thinwire.drivers.blocking import Blocking
from thinwire.errors import ConfigError
from thinwire.net import frames
from thinwire.net.costs import Link
from thinwire.net.executor import ProcessGroupExecutor
from thinwire.net.groups import private_groups
from thinwire.net.handshake import agree
from thinwire.net.meter import Meter
from thinwire.net.rank_info import RankInfo

Sent = Sequence[Messages | Sums]
Post = Callable[[AnyProtocol, I64], Awaitable[Sent]]
"""Has every server encode so many of its samples; gives what all of them sent."""


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
    rng: np.random.Generator | None = None,
) -> Estimate:
    """The distribution that the samples come from, by the protocol that promises the smallest error.

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
        rng: tosses private coins; from the operating system if None.

    Samples outside the domain, an empty shard, settings that differ: an error on every rank.
    """
    shards = isinstance(samples, list | tuple) and not _is_flat(cast("Sequence[Any]", samples))
    if not shards and dist.is_available() and dist.is_initialized():
        question = Question(
            domain, bits, structure, pieces, norm, epsilon, increasing, seed, network or "ring"
        )
        return _on_ranks(samples, question, process_group, rng)
    if process_group is not None:
        raise ConfigError("with a process group each rank gives one array, its own shard, not a list of them")
    question = Question(
        domain, bits, structure, pieces, norm, epsilon, increasing, seed, network or "referee"
    )
    return _in_one_process(cast("Sequence[Any]", samples) if shards else [samples], question, rng)


def learning(
    samples: Any,
    question: Question,
    rank_info: RankInfo,
    result: list[Estimate],
    rng: np.random.Generator | None = None,
) -> Program:
    """What one rank does to learn: a coroutine for a driver; appends the answer to `result`."""
    return _program(samples, question, rank_info, result, rng)


def _is_flat(samples: Sequence[Any]) -> bool:
    return bool(samples) and all(isinstance(sample, int | np.integer) for sample in samples)


# -- the rounds, wherever the servers are ------------------------------------------------------------------


async def _answer(question: Question, sizes: I64, post: Post) -> Estimate:
    ranked = plans(question, sizes)
    plan = ranked[0]
    protocol, bits = plan.protocol, 0
    if isinstance(protocol, QuantileCells):
        quota = _spread(protocol.pilot_samples, sizes)
        pilot = protocol.pilot
        bits += int(quota.sum()) * pilot.bits_per_message
        protocol = protocol.refine(estimate(pilot, await post(pilot, quota)))
    messages = await post(protocol, plan.quota)
    n = int(plan.quota.sum())
    bits += protocol.bits_per_message * (len(sizes) if isinstance(protocol, Additive) else n)
    p, error, misfit = fitted(question, protocol, messages, n, plan.predicted)
    warnings = fit_warning(question, misfit, plan.predicted)
    reason = _reason(question, ranked, sizes)
    return Estimate(p, error, misfit, question.norm, bits, protocol, reason, warnings=warnings)


def _spread(total: int, sizes: I64) -> I64:
    """`total` samples over the shards, in proportion, and one of each at least."""
    share = np.floor(sizes * (total / int(sizes.sum()))).astype(np.int64)
    return np.minimum(sizes, np.maximum(share, 1))


def _reason(question: Question, ranked: Sequence[Plan], sizes: I64) -> str:
    best = ranked[0]
    text = f"{best.protocol} promises an {question.norm} error of {best.predicted:.3g} for {best.bits:,} bits"
    others = [plan for plan in ranked[1:] if type(plan.protocol) is not type(best.protocol)]
    if others:
        text += f"; next is {others[0].protocol} with {others[0].predicted:.3g}"
    needed, room = 32 * question.domain, table_bits(question, sizes)
    if question.epsilon is None:
        verdict = "fit" if needed <= room else "do not fit"
        text += f"; exact counts take {needed:,} bits a server and {verdict} into {room:,.0f}"
        text += f" ({question.network})"
    return text


def chosen(samples: Any, quota: int, question: Question, server: int) -> Any:
    """`quota` samples of a server, picked at random; the same wherever the server runs."""
    if quota == len(samples):
        return samples
    rng = np.random.default_rng([question.seed, server])
    return samples[rng.choice(len(samples), quota, replace=False)]


# -- one process --------------------------------------------------------------------------------------------


def _in_one_process(shards: Sequence[Any], question: Question, rng: np.random.Generator | None) -> Estimate:
    if not shards:
        raise ConfigError("there are no shards to learn from")
    checked: list[Any] = []
    for number, shard in enumerate(shards):
        try:
            checked.append(check_samples(shard, question.domain))
        except ConfigError as error:
            raise ConfigError(f"shard {number}: {error}") from None
    sizes = np.array([len(shard) for shard in checked], np.int64)

    async def post(protocol: AnyProtocol, quota: I64) -> Sent:
        # Players are numbered over all shards, and tables add up: one shard or many makes no difference.
        parts = [
            chosen(s, int(q), question, i) for i, (s, q) in enumerate(zip(checked, quota, strict=True)) if q
        ]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return [encode(protocol, joined, rng, 0)]

    answer = _result_of(_answer(question, sizes, post))
    for warning in answer.warnings:
        log.warning("%s", warning)
    return answer


def _result_of(coroutine: Any) -> Estimate:
    """Of a coroutine that waits for nobody."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(Estimate, done.value)
    raise AssertionError("a coroutine of one process waits for another")


# -- ranks --------------------------------------------------------------------------------------------------


def _on_ranks(
    samples: Any, question: Question, group: dist.ProcessGroup | None, rng: np.random.Generator | None
) -> Estimate:
    (private,) = private_groups(group, 1)
    meter = Meter()
    network = ProcessGroupExecutor(private, meter)
    try:
        agree(question.describe(), network.execute, dist.get_process_group_ranks(private))
        result: list[Estimate] = []
        Blocking(network.execute).run(learning(samples, question, network.rank_info, result, rng))
    finally:
        network.close()
    answer = replace(result[0], wire_bytes=meter.sent_bytes + meter.received_bytes)
    for warning in answer.warnings if network.rank_info.rank == 0 else ():
        log.warning("%s", warning)
    return answer


async def _program(
    samples: Any,
    question: Question,
    rank_info: RankInfo,
    result: list[Estimate],
    rng: np.random.Generator | None,
) -> None:
    ranks = _Ranks(question, rank_info, rng)
    sizes = await ranks.muster(samples)
    result.append(await _answer(question, sizes, ranks.post))


class _Ranks:
    """The servers are the ranks of a group; everybody is a referee."""

    def __init__(self, question: Question, rank_info: RankInfo, rng: np.random.Generator | None) -> None:
        self.question = question
        self.rank_info = rank_info
        self.rng = rng
        self.samples: Any = None
        self.context = mark_of(repr(question))

    async def muster(self, samples: Any) -> I64:
        """Everybody's number of samples. Bad samples on one rank are an error on all."""
        complaint, count = b"", 0
        try:
            self.samples = check_samples(samples, self.question.domain)
            count = len(self.samples)
        except ConfigError as error:
            complaint = str(error).encode()
        parts = [torch.tensor([count]), torch.frombuffer(bytearray(complaint or b" "), dtype=torch.uint8)]
        sizes: list[int] = []
        complaints: list[str] = []
        for rank, (theirs, text) in enumerate(await self._gather(parts)):
            if theirs.numel() != 1 or not 0 <= int(theirs[0]) < 2**48:
                raise frames.PayloadError(f"rank {rank} does not say how many samples it has")
            sizes.append(int(theirs[0]))
            told = frames.to_bytes(text).decode(errors="replace").strip()
            complaints += [f"rank {rank}: {told}"] if told or not sizes[-1] else []
        if complaints:
            raise ConfigError("; ".join(complaints))
        return np.array(sizes, np.int64)

    async def post(self, protocol: AnyProtocol, quota: I64) -> Sent:
        mine = int(quota[self.rank_info.rank])
        firsts = np.cumsum(quota) - quota
        sent = None
        if mine:
            own = chosen(self.samples, mine, self.question, self.rank_info.rank)
            sent = encode(protocol, own, self.rng, int(firsts[self.rank_info.rank]))
        if isinstance(protocol, Additive):
            table = protocol.empty() if sent is None else cast(Sums, sent).table
            flat = torch.from_numpy(np.ascontiguousarray(table)).view(-1)
            total = (await added(flat)).numpy().reshape(table.shape)
            return [Sums(total, int(quota.sum()))]
        payload = torch.empty(0, dtype=torch.uint8)
        if sent is not None:
            payload = torch.from_numpy(cast(Messages, sent).payload)
        received = await self._gather([payload])
        return [
            Messages(theirs.numpy(), int(count), int(first))
            for (theirs,), count, first in zip(received, quota, firsts, strict=True)
        ]

    async def _gather(self, parts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        found: list[list[list[torch.Tensor]]] = []

        async def task(ch: Channel) -> None:
            found.append(await ch.gather(parts, ragged=True))

        ch = Channel(self.rank_info, step=0, seed=self.question.seed, key="", device=torch.device("cpu"))
        await together([task(ch)], self.rank_info, step=0, mark=self.context, link=Link())
        return found[0]
