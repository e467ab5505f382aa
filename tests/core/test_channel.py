"""Rounds: what several exchanges ask for together travels together, over the cheapest transport."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core import Channel, Exchange, Traits
from thinwire.core.channel import together
from thinwire.drivers import Lockstep
from thinwire.errors import PayloadError, ThinwireError
from thinwire.net import costs, frames
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo


def run_all(
    size: int, make, driver: Lockstep | None = None, link: Link | None = None
) -> tuple[list, Lockstep]:
    """Run `make(channel, results)` tasks on every rank in lock-step; returns each rank's results."""
    driver = driver or Lockstep(size)
    results: list[list] = [[] for _ in range(size)]
    programs = []
    for rank_info in driver.rank_infos:
        channel = Channel(rank_info, step=0, seed=0, key="x", device=torch.device("cpu"), link=link or Link())
        tasks = make(channel, results[rank_info.rank])
        programs.append(together(tasks, rank_info, step=0, mark=1, link=link or Link()))
    driver.run(programs)
    return results, driver


@pytest.mark.parametrize("lengths", [[3, 3, 3], [0, 5, 1], [1, 1, 4000], [0, 0, 0], [100000, 1, 1]])
def test_ragged_gather(lengths: list[int]) -> None:
    def make(ch: Channel, results: list):
        async def task() -> None:
            mine = torch.full((lengths[ch.rank],), float(ch.rank))
            results.append(await ch.gather([mine, mine.to(torch.uint8)], longest=[10**6] * 2))

        return [task()]

    results, _ = run_all(3, make)
    for (got,) in results:
        for rank, (floats, small) in enumerate(got):
            assert torch.equal(floats, torch.full((lengths[rank],), float(rank)))
            assert torch.equal(small, floats.to(torch.uint8))


def test_each_transport_of_the_ragged_gather_is_used_and_saves_bytes() -> None:
    even = [1000] * 4
    one_long = [1_000_000, 16, 16, 16]
    mixed = [50_000, 30_000, 40_000, 20_000]
    assert costs.cheapest_ragged_gather(even, Link()) == "padded"
    assert costs.cheapest_ragged_gather(one_long, Link()) == "broadcast"
    assert costs.cheapest_ragged_gather(mixed, Link()) == "direct"

    def make(ch: Channel, results: list):
        async def task() -> None:
            mine = torch.zeros(mixed[ch.rank], dtype=torch.uint8)
            results.append(await ch.gather([mine], longest=[10**6]))

        return [task()]

    _, driver = run_all(4, make)
    padded = 3 * (max(mixed) + frames.HEADER_BYTES)
    assert sum(meter.sent_bytes for meter in driver.meters) < 0.75 * 4 * padded


@given(st.lists(st.integers(16, 10**7), min_size=2, max_size=64))
def test_the_chosen_transport_is_never_far_from_the_best(sizes: list[int]) -> None:
    link = Link()
    depth, n = costs.tree_depth(len(sizes)), len(sizes)
    seconds = {
        "padded": link.seconds(n - 1, (n - 1) * max(sizes)),
        "direct": link.seconds(n - 1, (n - 1) * max(sizes)),
        "broadcast": link.seconds(n * depth, depth * sum(sizes)),
    }
    assert seconds[costs.cheapest_ragged_gather(sizes, link)] <= min(seconds.values()) * 1.0001


SLOW = Link(latency=1e-4, bandwidth=1.25e6)
"""A piece of 32 KiB takes 26 ms, its latency 0.1 ms."""


@pytest.mark.parametrize("lengths", [[100_000] * 3, [70_003, 100_001, 9]])
@pytest.mark.parametrize("kind", ["gather", "ragged gather", "scatter"])
def test_on_a_slow_link_large_payloads_are_sent_in_pieces(kind: str, lengths: list[int]) -> None:
    """The results, and the payload that is counted, are those of one operation."""

    def make(ch: Channel, results: list):
        def entries(n: int, to: int = 0) -> torch.Tensor:
            return torch.arange(n, dtype=torch.float32) + 1000 * ch.rank + to

        async def task() -> None:
            match kind:
                case "gather":
                    results.append(await ch.gather([entries(lengths[0])]))
                case "ragged gather":
                    results.append(await ch.gather([entries(lengths[ch.rank])], longest=[10**6]))
                case _:
                    results.append(await ch.scatter([[entries(n, to)] for to, n in enumerate(lengths)]))

        return [task()]

    fast, once = run_all(3, make)
    slow, driver = run_all(3, make, link=SLOW)
    for (got,), (expected,) in zip(slow, fast, strict=True):
        assert all(torch.equal(mine, its) for (mine,), (its,) in zip(got, expected, strict=True))
    before, after = once.meters[1].total, driver.meters[1].total
    assert after.payload_bytes == before.payload_bytes
    assert after.overhead_bytes == before.overhead_bytes
    assert after.sent_bytes == before.sent_bytes
    assert after.operations > before.operations + 5


def test_pieces_are_as_many_as_pay() -> None:
    assert costs.slices(10**6, SLOW) == 30
    assert costs.slices(60_000, SLOW) == 1
    assert costs.slices(10**6, Link(latency=5e-3, bandwidth=1.25e6)) == 1, "each would wait for a latency"
    assert costs.slices(10**6, Link()) == 1
    assert costs.slices(10**6, replace(SLOW, operation=1.0)) == 1, "each is an operation more"


def test_one_payload_a_round_for_many_tensors() -> None:
    def make(ch: Channel, results: list):
        async def gathers(n: int) -> None:
            results.append(await ch.gather([torch.full((n,), ch.rank, dtype=torch.int32)]))

        async def means() -> None:
            results.append(await ch.mean(torch.tensor([float(ch.rank)])))

        return [gathers(3), means(), gathers(5), means()]

    results, driver = run_all(3, make)
    for meter in driver.meters:
        assert meter.rounds == 1, "small means ride inside the gather"
    for got in results:
        assert len(got) == 4
        assert [answer.item() for answer in got if isinstance(answer, torch.Tensor)] == [1.0, 1.0]


@pytest.mark.parametrize(("numel", "rounds"), [(5, 2), (100_000, 3)])
def test_small_means_wait_for_the_gather_after_a_scatter(numel: int, rounds: int) -> None:
    def make(ch: Channel, results: list):
        async def split() -> None:
            (got,) = (
                await ch.scatter([[torch.tensor([float(10 * ch.rank + to)])] for to in range(ch.size)])
            )[0]
            results.append(await ch.gather([got]))

        async def means() -> None:
            results.append(await ch.mean(torch.full((numel,), float(ch.rank))))

        return [split(), means()]

    results, driver = run_all(3, make)
    assert driver.meters[0].rounds == rounds
    for answers in results:
        (mean,) = [answer for answer in answers if isinstance(answer, torch.Tensor)]
        assert torch.equal(mean, torch.ones(numel))
        (gathered,) = [answer for answer in answers if isinstance(answer, list)]
        assert [float(part) for (part,) in gathered] == [0.0, 1.0, 2.0]


def test_large_means_do_not_ride_in_gathers() -> None:
    def make(ch: Channel, results: list):
        async def gathers() -> None:
            await ch.gather([torch.zeros(3)])

        async def means() -> None:
            results.append(await ch.mean(torch.full((100_000,), float(ch.rank))))

        return [gathers(), means()]

    results, driver = run_all(2, make)
    assert driver.meters[0].by_operation.keys() == {"all_reduce", "all_gather"}
    assert torch.equal(results[0][0], torch.full((100_000,), 0.5))


@pytest.mark.parametrize("ragged", [False, True])
def test_scatter(ragged: bool) -> None:
    def make(ch: Channel, results: list):
        async def task() -> None:
            count = [(ch.rank + 1 if ragged else 1) * (to + 1) for to in range(ch.size)]
            pieces = [[torch.full((n,), 10 * ch.rank + to)] for to, n in enumerate(count)]
            results.append(await ch.scatter(pieces, longest=[20] if ragged else None))

        return [task()]

    results, _ = run_all(4, make)
    for rank, (got,) in enumerate(results):
        for src, (piece,) in enumerate(got):
            expected = (src + 1 if ragged else 1) * (rank + 1)
            assert torch.equal(piece, torch.full((expected,), 10 * src + rank))


def test_broadcast() -> None:
    def make(ch: Channel, results: list):
        async def task(src: int) -> None:
            results.append(
                await ch.broadcast([torch.full((4,), float(ch.rank)), torch.tensor([ch.rank])], src)
            )

        return [task(2), task(0), task(2)]

    results, driver = run_all(3, make)
    for got in results:
        assert all(part[0].tolist() == [float(part[1])] * 4 for part in got)
        assert sorted(int(part[1]) for part in got) == [0, 2, 2]
    assert driver.meters[0].rounds == 2, "one broadcast per source"


def test_a_deadlock_is_an_assertion() -> None:
    def make(ch: Channel, results: list):
        async def task() -> None:
            if ch.rank == 0:
                await ch.mean(torch.zeros(3))
            else:
                await ch.gather([torch.zeros(3)])

        return [task()]

    with pytest.raises(AssertionError, match=r"deadlock.*rank 0: all_reduce.*rank 1: all_gather"):
        run_all(2, make)


def test_a_rank_that_ends_early_is_a_deadlock() -> None:
    def make(ch: Channel, results: list):
        async def task() -> None:
            if ch.rank == 0:
                await ch.mean(torch.zeros(3))

        return [task()]

    with pytest.raises(AssertionError, match="rank 1: finished"):
        run_all(2, make)


def test_random_generators() -> None:
    def channel(rank: int, step: int = 0, key: str = "w") -> Channel:
        return Channel(RankInfo(rank, 4), step=step, seed=3, key=key, device=torch.device("cpu"), link=Link())

    assert channel(0).shared_seed() == channel(3).shared_seed()
    seeds = {channel(rank).private_seed() for rank in range(4)}
    assert len(seeds) == 4
    others = {channel(0).shared_seed(), channel(0, step=1).shared_seed(), channel(0, key="v").shared_seed()}
    assert len(others | seeds) == 7
    drawn = torch.rand(3, generator=channel(1).shared_rng())
    assert torch.equal(drawn, torch.rand(3, generator=channel(2).shared_rng()))


@dataclass(frozen=True)
class _TalksAfterSettling(Exchange):
    name: ClassVar[str] = "talks"

    @property
    def traits(self) -> Traits:
        return Traits()

    async def run(self, x, out, state, ch) -> None:
        await ch.commit(True)
        await ch.mean(x, out)

    def payload_bytes(self, layout, size, link) -> int:
        return 0


def test_an_operation_after_the_commit_is_refused_by_the_blocking_driver() -> None:
    from thinwire.drivers import Blocking
    from thinwire.sessions.gradient import Session

    session = Session([("w", torch.zeros(3))], _TalksAfterSettling(), rank_info=RankInfo(0, 1), dense_below=0)
    _, views = session.engine.views({"w": torch.ones(3)})
    with pytest.raises(AssertionError, match="after its last answer"):
        Blocking(lambda op: op).run(session.engine.program(views))


# -- what a peer announces ---------------------------------------------------------------------------------


class Boaster(Lockstep):
    """Rank 1 announces more bytes than it has."""

    def __init__(self, size: int, announced: int) -> None:
        super().__init__(size)
        self._announced = announced

    def perform(self, ops, ranks, *, inside=False):
        for op in ops[1:2]:
            blocks = [op.block] if isinstance(op, frames.AllGather) else op.blocks
            for block in blocks:
                if block.numel() in (2, 4):  # a length, not a frame
                    block.copy_(torch.tensor(list(self._announced.to_bytes(block.numel(), "little"))))
        return super().perform(ops, ranks, inside=inside)


@pytest.mark.parametrize(
    ("longest", "announced"),
    [(100, 0), (100, 17), (100, 888), (100, 2**16 - 8), (20_000, 8), (20_000, 2**17), (20_000, 2**32 - 8)],
)
@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_a_length_that_cannot_be_is_refused_before_memory_is_reserved(
    kind: str, longest: int, announced: int
) -> None:
    """float32 and a folded mean of 2 make a frame of at most 16 + 8 + 4 longest + 8 bytes.

    Lengths are told in two bytes, if all fit, or in four.
    """

    def make(ch: Channel, results: list):
        async def ask() -> None:
            mine = [torch.zeros(3)]
            if kind == "gather":
                await ch.gather(mine, longest=[longest])
            else:
                await ch.scatter([mine] * ch.size, longest=[longest])

        async def folded() -> None:
            if kind == "gather":
                await ch.mean(torch.zeros(2))

        return [ask(), folded()]

    limit = 24 + 4 * longest + (8 if kind == "gather" else 0)
    expected = f"rank 1 announces a payload of {announced} bytes; this method sends at most {limit}"
    with pytest.raises(PayloadError, match=expected):
        run_all(3, make, Boaster(3, announced))


def test_parts_beyond_their_own_limit_are_not_sent() -> None:
    def make(ch: Channel, results: list):
        async def task() -> None:
            await ch.gather([torch.zeros(3)], longest=[2])

        return [task()]

    with pytest.raises(ThinwireError, match=r"parts of \[3\] entries do not fit the limits \[2\]"):
        run_all(1, make)


@pytest.mark.parametrize(("limit", "bytes_each"), [(2**16 - 8, 2), (2**16, 4), (2**32 - 8, 4), (2**32, 8)])
def test_a_length_takes_as_few_bytes_as_the_limit_allows(limit: int, bytes_each: int) -> None:
    from thinwire.core.channel import _lengths_in, _written

    lengths = [limit, frames.HEADER_BYTES, limit - 8]
    written = _written(lengths, limit)
    assert written.numel() == 3 * bytes_each
    assert _lengths_in(written, limit) == lengths
