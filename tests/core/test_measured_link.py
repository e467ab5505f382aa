"""The link that a session measures: all ranks vote, and draw the same conclusion at the same step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from thinwire.core import measured_link
from thinwire.core.measured_link import EVERY, FIRST, SHARE, TRIAL, Buckets, MeasuredLink, given_link
from thinwire.drivers import Lockstep
from thinwire.errors import ConfigError, PayloadError
from thinwire.net import costs, estimate, frames
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo

SIZE = 3
CPU = torch.device("cpu")


class Group:
    """The measured links of some ranks; `step` lets them vote if that is due."""

    def __init__(self, size: int = SIZE, *, buckets: int = 4) -> None:
        self.driver = Lockstep(size)
        self.now = [0.0] * size
        self.ranks = [
            MeasuredLink(RankInfo(rank, size), speaks=False, clock=lambda rank=rank: self.now[rank])
            for rank in range(size)
        ]
        self.steps, self.buckets, self.votes = 0, buckets, list[int]()
        for rank in self.ranks:
            rank.buckets = Buckets()

    def step(self, seconds: Sequence[float], link: Link | None = None) -> Link:
        """A step that took each rank so long, on this link."""
        self.now = [now + mine for now, mine in zip(self.now, seconds, strict=True)]
        found = [rank.conclude(self.steps) for rank in self.ranks]
        assert found == found[:1] * len(found)
        assert len({rank.buckets.merged for rank in self.ranks if rank.buckets}) == 1
        for rank in self.ranks:
            assert rank.buckets is not None
            rank.buckets.count = self.buckets
            for length in (100, 1_000_000) if link is not None else ():
                cost = costs.all_gather(len(self.ranks), length)
                rank.samples.add(cost, (link or Link()).seconds_for(cost))
        due = [rank.is_due(self.steps) for rank in self.ranks]
        assert due == due[:1] * len(due)
        if due[0]:
            self.votes.append(self.steps)
            self.driver.run([rank.vote(CPU) for rank in self.ranks])
        self.steps += 1
        return found[0]

    @property
    def merged(self) -> bool:
        assert self.ranks[0].buckets is not None
        return self.ranks[0].buckets.merged


def run(group: Group, steps: int, apart: float, together: float, link: Link | None = None) -> Link:
    found = Link()
    for _ in range(steps):
        base = together if group.merged else apart
        found = group.step([base, 1.1 * base, 0.9 * base], link)
    return found


def test_all_ranks_take_the_link_of_the_operations_at_the_same_step() -> None:
    group, slow = Group(), Link(5e-3, 1e6)
    assert run(group, FIRST + 1, 0.1, 0.1, slow) == Link()
    found = run(group, 1, 0.1, 0.1, slow)
    assert found.latency == pytest.approx(slow.latency, rel=0.1)
    assert found.bandwidth == pytest.approx(slow.bandwidth, rel=0.1)
    nearly = Link(1.2 * slow.latency, slow.bandwidth / 1.2)
    assert run(group, 2 * EVERY, 0.1, 0.1, nearly) == found, "a small difference is no other link"


def test_buckets_are_exchanged_together_if_a_trial_says_so() -> None:
    group, link = Group(), Link(5e-3, 125e6)
    run(group, FIRST + 2, apart=0.1, together=0.08, link=link)
    assert group.merged, "a trial"
    run(group, TRIAL, apart=0.1, together=0.08, link=link)
    assert group.merged
    run(group, 3 * EVERY, apart=0.1, together=0.08, link=link)
    assert group.merged
    saving = [FIRST + 1 + TRIAL, FIRST + 2 + 2 * TRIAL]  # the trial of fewer operations
    assert group.votes[:4] == [FIRST, *saving, saving[-1] + 1 + EVERY]


def test_a_trial_that_is_not_faster_ends() -> None:
    group = Group()
    run(group, FIRST + 2, apart=0.1, together=0.1, link=Link(5e-3, 125e6))
    assert group.merged
    run(group, TRIAL + 1, apart=0.1, together=0.1, link=Link(5e-3, 125e6))
    assert not group.merged
    run(group, 2 * EVERY, apart=0.1, together=0.01, link=Link(5e-3, 125e6))
    assert not group.merged, "on the same link there is no second trial"


def test_another_link_brings_another_trial() -> None:
    group = Group()
    run(group, FIRST + TRIAL + 3, apart=0.1, together=0.08, link=Link(5e-3, 125e6))
    assert group.merged
    run(group, EVERY + 1, apart=0.05, together=0.08, link=Link(1e-4, 125e6))
    run(group, EVERY + TRIAL, apart=0.05, together=0.08, link=Link(1e-4, 125e6))
    assert not group.merged


@pytest.mark.parametrize(("buckets", "seconds"), [(1, 0.1), (4, 10.0)])
def test_there_is_no_trial_where_nothing_is_to_be_gained(buckets: int, seconds: float) -> None:
    """With one bucket, or if the messages take next to nothing of the time."""
    group = Group(buckets=buckets)
    run(group, FIRST + 2, seconds, seconds, Link(1e-3, 125e6))
    assert not group.merged


def run_saving(group: Group, steps: int, bytes_first: float, operations_first: float, link: Link) -> Link:
    found = Link()
    for _ in range(steps):
        found = group.step([operations_first if group.ranks[0].link.operation else bytes_first] * SIZE, link)
    return found


def test_fewer_operations_are_taken_if_steps_are_shorter_with_them() -> None:
    group, link = Group(buckets=1), Link(1e-3, 1e6)
    assert run_saving(group, FIRST + 1, 0.1, 0.08, link).operation == 0
    assert run_saving(group, 1, 0.1, 0.08, link).operation == pytest.approx(SHARE * 0.1), "a trial"
    found = run_saving(group, TRIAL + 3 * EVERY, 0.1, 0.08, link)
    assert found.operation == pytest.approx(SHARE * 0.1)
    assert group.votes[1] == FIRST + 1 + TRIAL
    assert group.ranks[0].metrics()["fewer_operations"] == 1.0


def test_fewer_operations_are_left_again_if_steps_are_not_shorter() -> None:
    group, link = Group(buckets=1), Link(1e-3, 1e6)
    run_saving(group, FIRST + 2, 0.1, 0.099, link)
    assert group.ranks[0].link.operation, "a trial"
    found = run_saving(group, TRIAL + 1, 0.1, 0.099, link)
    assert found.operation == 0
    assert run_saving(group, 3 * EVERY, 0.1, 0.01, Link(3e-3, 1e6)).operation == 0, "about the same link"
    assert run_saving(group, 3 * EVERY, 0.1, 0.01, Link(30e-3, 1e6)).operation > 0


def test_short_operations_do_not_make_a_link_faster_than_it_was_measured() -> None:
    """A link that was idle lets some bytes pass at another rate."""
    shaped, seen, long = Link(1e-4, 1e6), Link(1e-4, 1e8), estimate.BURST
    for length, expected in ((10_000, shaped.bandwidth), (long, seen.bandwidth)):
        samples = estimate.Samples()
        for size in (100, length):
            cost = costs.all_gather(SIZE, size)
            for _ in range(estimate.TIMES):
                samples.add(cost, seen.seconds_for(cost))
        found = samples.estimate(shaped, at_most=shaped.bandwidth)
        assert found is not None
        assert found.bandwidth == pytest.approx(expected, rel=0.1)
        assert found.latency > 0


@pytest.mark.parametrize("size", [2, 4])
def test_the_first_vote_comes_after_some_steps(size: int) -> None:
    measured = MeasuredLink(RankInfo(0, size), speaks=False)
    assert not measured.is_due(FIRST - 1)
    assert measured.is_due(FIRST)


def test_a_rank_that_has_measured_nothing_follows_the_others() -> None:
    """Such as one that is not the leader of its host."""
    group, slow = Group(), Link(5e-3, 1e6)
    for length in (100, 1_000_000):
        cost = costs.all_gather(SIZE, length)
        for _ in range(5):
            group.ranks[1].samples.add(cost, slow.seconds_for(cost))
    found = run(group, FIRST + 2, 0.1, 0.1)
    assert found.latency == pytest.approx(slow.latency, rel=0.1)


def test_a_vote_that_cannot_be_is_refused() -> None:
    measured = MeasuredLink(RankInfo(0, SIZE), speaks=False)
    program = measured.vote(CPU)
    op = program.send(None)
    assert isinstance(op, frames.AllGather)
    forged = torch.frombuffer(bytearray(8 * b"\xff" + 16 * b"\0" + 8 * b"\xf0"), dtype=torch.uint8)
    with pytest.raises(PayloadError, match="measured of the link"):
        program.send(torch.stack([op.block, forged, op.block]))


def test_the_link_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(measured_link.VARIABLE, "up=10mbit,down=50mbit,latency=1s;1:20mbit,latency=2s")
    assert given_link(None) == Link(2.0, 1.25e6, 2.5e6)
    assert given_link(Link(1.0, 2.0)) == Link(1.0, 2.0)
    monkeypatch.setenv(measured_link.VARIABLE, "fast")
    with pytest.raises(ConfigError, match="'fast'"):
        given_link(None)
    monkeypatch.delenv(measured_link.VARIABLE)
    assert given_link(None) is None


def test_one_trial_at_a_time() -> None:
    """A link that changes while fewer operations are tried brings a trial of buckets only afterwards."""
    group, link, other = Group(), Link(5e-3, 125e6), Link(0.5, 125e6)
    run(group, FIRST + TRIAL + 3, apart=0.1, together=0.08, link=link)
    assert group.merged
    assert group.ranks[0].link.operation, "a trial"
    run(group, TRIAL + EVERY, apart=0.1, together=0.08, link=other)
    assert group.merged
    run(group, 2, apart=0.1, together=0.08, link=other)
    assert not group.merged, "a trial of buckets one by one, on the other link"


def test_a_link_that_is_measured_anew_ends_the_trial_of_fewer_operations() -> None:
    group, link = Group(buckets=1), Link(1e-3, 1e6)
    run_saving(group, FIRST + 2, 0.1, 0.1, link)
    assert group.ranks[0].link.operation, "a trial"
    for rank in group.ranks:
        rank.begin(link)
    assert run_saving(group, TRIAL + 2, 0.1, 0.1, link).operation == 0
