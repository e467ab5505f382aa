"""Predictions: the operations are those of the code that trains, and the clock adds up."""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.laws.cohort import LINKS, Cohort
from thinwire import ConfigError, list_methods, parse, predict
from thinwire.drivers.lockstep import Lockstep
from thinwire.net import costs
from thinwire.net.costs import Link
from thinwire.net.link import slowest_link
from thinwire.net.meter import INSIDE
from thinwire.net.rank_info import RankInfo
from thinwire.predict import player, timeline
from thinwire.predict.buckets import Shapes
from thinwire.predict.mirror import Job, Mirror, Round
from thinwire.predict.sync_rounds import play_cycle
from thinwire.sessions.periodic import PeriodicSession

SHAPES = {"first": (60, 50), "bias": (60,), "second": (40, 60), "head": (10, 40)}
LINK = Link(latency=1e-3, bandwidth=1e6)


# Links differ in the cheapest way to average codes of the large one.
LONG = {"large": (250, 400), "bias": (400,)}


def in_lockstep(
    method: str, size: int, shapes: Shapes = SHAPES, link: Link | None = None
) -> tuple[dict[str, int], int]:
    """Operations by kind and the most bytes a rank handed over, all ranks with the same gradients."""
    cohort = Cohort(method, size, shapes, dense_below=1024, link=link)
    rng = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(math.prod(s), generator=rng).view(s) for name, s in shapes.items()}
    for session in cohort.sessions:
        session.engine.step = 1_000_000 - 1_000_000 % size
    cohort.average([{name: g.clone() for name, g in gradients.items()} for _ in range(size)])
    meters = cohort.driver.meters
    kinds = {name: tally.operations for name, tally in meters[0].by_operation.items()}
    return kinds, max(meter.payload_bytes + meter.overhead_bytes for meter in meters)


# Lazy methods send what has changed since their last step, which the two runs do not share.
STEADY = [name for name in list_methods() if not hasattr(parse(name), "upload_bits")]


@pytest.mark.parametrize("method", STEADY)
def test_one_rank_that_stands_for_all_sees_what_all_see(method: str) -> None:
    for size in (2, 5):
        played = predict.profile(method, SHAPES, size, host="average", repeats=1)
        check_played(played, *in_lockstep(method, size))


def check_played(played: predict.Profile, kinds: dict[str, int], payload: int) -> None:
    """Its step has these operations and bytes."""
    rounds = [r for job in played.steps[0] for r in job.rounds]
    names = [INSIDE * r.inside + r.operation for r in rounds]
    assert {name: names.count(name) for name in names} == kinds
    handed = sum(r.payload for r in rounds if not r.inside)
    # Random choices are each rank's own: their payloads differ by a few entries.
    assert handed == pytest.approx(payload, rel=0.05 if played.data_dependent else 0.01)


@pytest.mark.parametrize("text", LINKS)
@pytest.mark.parametrize(
    "method",
    ["qsgd(bits=4)", "signsgd", "efsign(bucket=4096)", "gspar(ratio=0.3)", "delayed(method=topk(ratio=0.1))"],
)
def test_operations_are_those_that_a_session_chooses_on_the_link(method: str, text: str) -> None:
    link = slowest_link(text)
    played = predict.profile(method, LONG, 5, link=link, host="average", repeats=1)
    check_played(played, *in_lockstep(method, 5, LONG, link))


def test_of_more_than_one_link_each_has_its_own_operations() -> None:
    near, far = (slowest_link(text) for text in (LINKS[0], LINKS[-1]))
    seconds = [predict.step_seconds("qsgd(bits=4)", LONG, 5, link) for link in (near, far)]
    found = [predict.profile_of("qsgd(bits=4)", LONG, 5, link=link) for link in (near, far)]
    assert [each.rounds for each in found] == [2, 1]
    assert seconds == [each.step_seconds(link) for each, link in zip(found, (near, far), strict=True)]
    assert predict.speed_up("qsgd(bits=4)", LONG, 5, far) == pytest.approx(
        predict.step_seconds("dense", LONG, 5, far) / seconds[1]
    )


def test_pieces_are_predicted_as_the_operation_that_they_are_cut_from() -> None:
    """They take as long as their bytes, as predictions assume; how many there are differs with the sample."""
    slow, shapes = slowest_link("10mbit,latency=50us"), {"large": LONG["large"]}
    assert costs.slices(math.prod(shapes["large"]), slow) > 1
    found = predict.profile("qsgd(bits=8)", shapes, 3, link=slow, repeats=1)
    assert found.rounds == 1
    found = predict.periodic_profile("pqasgd(every=4, bits=8)", shapes, 3, link=slow, repeats=1)
    assert found.rounds == 2 / 4


@pytest.mark.parametrize("method", list_methods())
def test_every_method_can_be_predicted_for_any_number_of_workers(method: str) -> None:
    """At 8 workers the uploads of some methods are collected by one rank, which sends none itself."""
    for size in (3, 8) if parse(method).traits.two_levels else (2, 3, 8):  # two ranks are one host
        played = predict.profile(method, SHAPES, size, repeats=1)
        assert played.sent_bytes > 0
        assert played.step_seconds(LINK) > 0


def test_a_rank_that_collects_is_given_what_the_others_send() -> None:
    found = predict.profile("laq(bits=4)", SHAPES, 8, repeats=1)
    (collected,) = [r for job in found.steps[0] for r in job.rounds if r.operation == "all_to_all"]
    entries = sum(math.prod(shape) for shape in SHAPES.values())
    assert collected.payload == 0
    assert collected.received == pytest.approx(7 * entries / 2, rel=0.2)  # 4 bits each, and control messages


@pytest.mark.parametrize("method", ["dense", "topk(ratio=0.01)", "qsgd(bits=4)", "powersgd(rank=4)", "lag"])
def test_a_part_stands_for_a_large_model(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are those of playing all of it, and work is counted for all of it."""
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # other processes do not count
    shapes = {f"layer {number}": (300, 200) for number in range(12)}
    whole = predict.profile(method, shapes, 4)
    monkeypatch.setattr(player, "SAMPLE", 100_000)
    monkeypatch.setattr(player, "WHOLE_SAMPLE", 100_000)
    part = predict.profile(method, shapes, 4)
    assert part.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.01)
    assert part.received_bytes == pytest.approx(whole.received_bytes, rel=0.01)
    assert (part.rounds, part.hops) == (whole.rounds, whole.hops)
    assert [len(jobs) for jobs in part.steps] == [len(jobs) for jobs in whole.steps]
    assert part.compression_seconds > whole.compression_seconds / 4


@pytest.mark.parametrize("text", LINKS)
@pytest.mark.parametrize("method", ["topk(ratio=0.1, scope='model')", "efsign(scope='bucket')"])
def test_a_part_has_the_operations_of_a_large_model(
    method: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an exchange that sees many tensors at once, and chooses by their length."""
    shapes, link = {f"layer {number}": (300, 200) for number in range(18)}, slowest_link(text)
    whole = predict.profile(method, shapes, 5, link=link, repeats=1)
    monkeypatch.setattr(player, "SAMPLE", 50_000)
    monkeypatch.setattr(player, "WHOLE_SAMPLE", 50_000)
    part = predict.profile(method, shapes, 5, link=link, repeats=1)
    assert part.rounds == whole.rounds
    assert part.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.02)


@pytest.mark.parametrize("text", LINKS)
def test_a_part_has_the_sync_rounds_of_a_large_model(text: str) -> None:
    shapes, link = {f"layer {number}": (300, 200) for number in range(18)}, slowest_link(text)
    schedule = parse("postlocal(every=2, warmup=0, fragments=2)")
    whole, part = (
        play_cycle(schedule, shapes, 5, dense_below=1024, repeats=0, link=link, most=most)
        for most in (10**7, 10**5)
    )
    for all_of, some in zip(whole.syncs, part.syncs, strict=True):
        names = [[r.operation for r in sync.job.rounds] for sync in (all_of, some)]
        assert names[0] == names[1]
        assert sum(r.sent for r in some.job.rounds) == pytest.approx(
            sum(r.sent for r in all_of.job.rounds), rel=0.02
        )


def test_only_a_part_of_a_large_model_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of seven equal layers for the buckets with seven, the last bucket and its other shape whole."""
    played: list[int] = []
    run = Mirror.run

    def counting(self: Mirror, *arguments: Any, **options: Any) -> Job:
        job = run(self, *arguments, **options)
        played.append(sum(each.op.tensor.numel() for each in self.operations[arguments[1]]))
        return job

    monkeypatch.setattr(Mirror, "run", counting)
    shapes = {f"layer {number}": (1024, 1024) for number in range(21)} | {"head": (600, 600)}
    found = predict.profile("dense", shapes, 8, repeats=1)
    assert [job.rounds[0].payload for job in found.steps[0]] == [4 * 360_000, *[4 * 7 * 2**20] * 3]
    assert set(played) == {360_000, 2 * 2**20}
    assert len(played) == 2 * 2  # one turn to warm up, one to measure


@pytest.mark.parametrize(("load", "expected"), [(0.0, 3), (1000.0, 1)])
def test_a_busy_machine_is_measured_with_one_thread(
    load: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    run = Mirror.run

    def watching(self: Mirror, *arguments: Any, **options: Any) -> Job:
        seen.add(torch.get_num_threads())
        return run(self, *arguments, **options)

    monkeypatch.setattr(Mirror, "run", watching)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        predict.profile("fp16", SHAPES, 4, repeats=1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {expected}


def test_ranges_that_reach_beyond_a_tensor_have_no_entries_there() -> None:
    """882,660 entries for 8 ranks: the last range is four entries short, and nobody may send these."""
    for repeats in (1, 8):
        predict.profile("topk(ratio=0.01, reduce='split')", {"layer": (940, 939)}, 8, repeats=repeats)


def test_bytes_of_a_thousand_workers_without_a_thousand_workers() -> None:
    dense = predict.profile("dense", SHAPES, 1024)
    entries = sum(math.prod(shape) for shape in SHAPES.values())
    messages = costs.gloo_all_reduce_messages(1024, 4 * entries)
    expected = costs.with_gloo_control(costs.all_reduce(1024, 4 * entries), messages, messages)
    assert (dense.sent_bytes, dense.hops, dense.rounds) == (expected.sent, 2 * 1023, 1)


def test_decoding_grows_with_the_workers_and_means_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # other processes do not count
    shapes = {"weight": (300, 400)}
    gathered = [predict.profile("qsgd(reduce='gather')", shapes, size) for size in (4, 64, 1024)]
    work = [each.compression_seconds for each in gathered]
    assert work[0] < work[1] < work[2]
    assert gathered[2].sent_bytes == pytest.approx(gathered[1].sent_bytes * 1023 / 63, rel=0.01)
    summed = [predict.profile("powersgd", shapes, size).compression_seconds for size in (64, 1024)]
    assert summed[1] < 5 * summed[0]


def test_turns_are_averaged() -> None:
    """`alternate` sends the longer factors in one step and the shorter ones in the next."""
    shapes = {"weight": (400, 100)}
    both = predict.profile("powersgd(rank=2, alternate=True)", shapes, 4)
    assert len(both.steps) == 2
    assert both.payload_bytes == 2 * (400 + 100) * 4 / 2


@pytest.mark.usefixtures("counted_time")
def test_the_averaging_of_replicas_counts() -> None:
    often, seldom = (predict.profile(f"a2sgd(average_every={n})", SHAPES, 4) for n in (2, 200))
    assert often.reconciliation is not None
    meeting = sum(r.sent for r in often.reconciliation.rounds)
    assert often.sent_bytes - seldom.sent_bytes == pytest.approx(meeting * (1 / 2 - 1 / 200))
    assert often.step_seconds(LINK) > seldom.step_seconds(LINK)


def test_a_profile_survives_json() -> None:
    own = predict.profile("a2sgd", SHAPES, 4)
    again = predict.Profile.from_json(json.loads(json.dumps(own.to_json())))
    assert again == own
    assert again.step_seconds(LINK, 0.1) == own.step_seconds(LINK, 0.1)


def test_buckets_are_cut_as_ddp_cuts_them() -> None:
    shapes = {"0.weight": (1024, 784), "0.bias": (1024,), "2.weight": (1024, 1024), "4.weight": (10, 1024)}
    assert predict.ddp_buckets(shapes) == [["4.weight", "2.weight"], ["0.bias", "0.weight"]]
    assert predict.ddp_buckets({"all": (5,)}) == [["all"]]


# -- the clock -----------------------------------------------------------------------------------------

FREE = Link(latency=0.0, bandwidth=costs.TCP_FRAMING)  # one byte of payload a second


def job(*rounds: tuple[float, int], closing: float = 0.0, commits: bool = False, finish: float = 0.0) -> Job:
    return Job(tuple(Round("all_reduce", w, b, b, b, 0) for w, b in rounds), closing, commits, finish)


def clock(jobs: list[Job], driver: timeline.Driver, cores: float = math.inf, compute: float = 0.0) -> float:
    shares = [1 / len(jobs)] * len(jobs)
    whole = timeline.Compute(0.0, compute)
    return timeline.step_seconds(jobs, shares, whole, FREE, driver, cores)


def test_blocking_adds_up() -> None:
    assert clock([job((1, 2), closing=3), job((4, 5))], "blocking", compute=10) == pytest.approx(25)


def test_a_link_is_shared_and_work_beside_it_is_not_waited_for() -> None:
    # Ready at 5 and at 10: the first is over before the second begins.
    assert clock([job((0, 4)), job((0, 4))], "lanes", compute=10) == pytest.approx(14)
    # Together on the link from 10 to 12, where each gets half of it.
    assert clock([job((0, 6)), job((0, 1))], "lanes", compute=10) == pytest.approx(12)
    # The second lane codes while the first one sends.
    assert clock([job((0, 3)), job((2, 1))], "lanes") == pytest.approx(4)


def test_one_core_works_on_one_thing_at_a_time() -> None:
    two = [job((5, 0)), job((5, 0))]
    assert clock(two, "lanes") == pytest.approx(5)
    assert clock(two, "lanes", cores=1) == pytest.approx(10)
    assert clock(two, "lanes", cores=1, compute=10) == pytest.approx(20)


def test_what_commits_waits_for_the_last_bucket() -> None:
    jobs = [job((0, 1), commits=True, finish=2), job((0, 9), commits=True, finish=2)]
    assert clock(jobs, "lanes") == pytest.approx(12)
    assert clock([job((0, 1), closing=2), job((0, 9), closing=2)], "lanes") == pytest.approx(12)


def test_direct_codes_in_the_hook_and_keeps_the_backward_pass_waiting() -> None:
    assert clock([job((3, 1)), job((3, 1))], "direct", compute=10) == pytest.approx(17)


def test_latency_counts_for_every_hop() -> None:
    slow = Link(latency=0.5, bandwidth=math.inf)
    one = [Job((Round("all_gather", 0.0, 8, 24, 24, 3),), 0.0, False, 0.0)]
    seconds = timeline.step_seconds(one, [1.0], timeline.Compute(0.0, 0.0), slow, "lanes")
    assert seconds == pytest.approx(1.5)


COSTLY = timeline.Overheads(operation=2.0, busy_operation=3.0, busy_hop=0.5, byte=0.25)


def one_round(sent: int, hops: int, overheads: timeline.Overheads, cores: float, compute: float) -> float:
    """A bucket that is ready at the beginning of the backward pass, and another without operations."""
    jobs = [
        Job((Round("all_reduce", 0.0, sent, sent, sent, hops),), 0.0, False, 0.0),
        Job((), 0.0, False, 0.0),
    ]
    sites = timeline.Sites(FREE, overheads)
    whole = timeline.Compute(0.0, compute)
    return timeline.step_seconds(jobs, [0.0, 1.0], whole, sites, "lanes", cores)


def test_an_operation_costs_more_while_all_cores_compute() -> None:
    assert one_round(0, 4, COSTLY, math.inf, 100.0) == pytest.approx(100)
    assert one_round(0, 4, COSTLY, math.inf, 0.0) == pytest.approx(2)
    # With one core 2 + 3 + 4 x 0.5 = 7 seconds pass while it computes: 4 of them are 4/7 of the operation.
    assert one_round(0, 4, COSTLY, 1, 4.0) == pytest.approx(4 + 2 * 3 / 7)


def test_an_operation_takes_processor_time_from_computing() -> None:
    works = timeline.Overheads(operation=2.0, work=1.5, sum_work=3.0)
    # Three seconds of the only core, shared with computing; with a second one they pass beside it.
    assert one_round(0, 4, works, 1, 10.0) == pytest.approx(13)
    assert one_round(0, 4, works, 2, 10.0) == pytest.approx(10)
    # Alone it takes its processor time and a tenth of its own, if that is less than the processor time.
    assert one_round(0, 4, works, 1, 0.0) == pytest.approx(3.2)
    (gather,) = [Job((Round("all_gather", 0.0, 8, 0, 0, 3),), 0.0, False, 0.0)]
    alone = timeline.Compute(0.0, 0.0)
    sites = timeline.Sites(FREE, works)
    assert timeline.step_seconds([gather], [1.0], alone, sites, "lanes", 1) == pytest.approx(2.0)
    assert works.times(2.0) == timeline.Overheads(operation=4.0, work=3.0, sum_work=6.0)


def test_bytes_take_processor_time_from_computing() -> None:
    # 8 bytes in 8 seconds take a quarter of a core for each direction: half of the only one.
    cpu = timeline.Overheads(byte=0.25)
    assert one_round(8, 0, cpu, 2, 10.0) == pytest.approx(10)
    assert one_round(8, 0, cpu, 1, 10.0) == pytest.approx(14)
    # Four times as much, and the processor is the limit: both share the core evenly.
    assert one_round(8, 0, timeline.Overheads(byte=1.0), 1, 16.0) == pytest.approx(32)


def test_jitter_makes_the_last_of_many_workers_late() -> None:
    each = [Job((Round("all_gather", 0.0, 8, 8, 8, 12),), 0.0, False, 0.0)]
    jittery = Link(latency=0.1, bandwidth=math.inf, jitter=0.1)

    def seconds(workers: int) -> float:
        sites = timeline.Sites(jittery, workers=workers)
        return timeline.step_seconds(each, [1.0], timeline.Compute(0.0, 0.0), sites, "lanes")

    assert seconds(1) == pytest.approx(1.2)
    assert 1.2 < seconds(64) < seconds(65536) <= 2.4


# -- a delay -------------------------------------------------------------------------------------------


def delayed(work: float, wire: int, cores: float = math.inf) -> float:
    """A step of 3 seconds of computing and one of the optimizer, beside the exchange of the one before."""
    compute = timeline.Compute(1.0, 2.0, 1.0)
    return timeline.step_seconds([job((work, wire))], [1.0], compute, FREE, "delayed", cores)


def test_the_exchange_of_a_delayed_step_runs_beside_the_next_one() -> None:
    assert delayed(0.5, 3) == pytest.approx(4), "hidden"
    assert delayed(1.0, 9) == pytest.approx(10), "as long as the exchange, not as the sum"
    # On one core the work is no longer hidden, and the wire still is.
    assert delayed(0.5, 3, cores=1) == pytest.approx(4.5)
    assert delayed(1.0, 9, cores=1) == pytest.approx(11, abs=1)
    assert delayed(1.0, 9) < timeline.step_seconds(
        [job((1.0, 9))], [1.0], timeline.Compute(1.0, 2.0, 1.0), FREE, "lanes"
    )


@pytest.mark.usefixtures("counted_time")
@pytest.mark.parametrize("wait", ["1", "'auto'"])
def test_a_delayed_method_takes_as_long_as_the_longer_of_computing_and_exchange(wait: str) -> None:
    slow = Link(latency=1e-3, bandwidth=1e5)
    plain, late = (
        predict.profile(method, SHAPES, 4)
        for method in ("topk(ratio=0.1)", f"delayed(method=topk(ratio=0.1), delay={wait})")
    )
    assert late.sent_bytes == pytest.approx(plain.sent_bytes, rel=0.05)
    wire = late.link_seconds(slow)
    hidden = late.step_seconds(slow, 3 * wire)
    assert hidden == pytest.approx(3 * wire, rel=0.05)
    assert hidden < plain.step_seconds(slow, 3 * wire)
    assert late.step_seconds(slow, wire / 3) == pytest.approx(wire, rel=0.3)
    assert predict.Profile.from_json(json.loads(json.dumps(late.to_json()))) == late


# -- periodic methods ----------------------------------------------------------------------------------


def cycles(delay: int, compute: float = 1.0, fragments: int = 1, wire: int = 6) -> float:
    cycle = timeline.Cycle(8, fragments, delay)
    sites = timeline.Sites(FREE)
    syncs = [timeline.Sync(job((1.0, wire)), 0.5, 0.5)] * fragments
    return timeline.cycle_seconds(cycle, syncs, timeline.Compute.of(compute), sites, math.inf)


def test_a_sync_round_is_waited_for_unless_it_overlaps() -> None:
    # 8 seconds of steps, 8 of a sync round: work and wire, begun and applied by the training loop.
    assert cycles(0) == pytest.approx((8 + 0.5 + 7 + 0.5) / 8)
    assert cycles(7) == pytest.approx((8 + 1) / 8), "7 steps hide 7 seconds"
    assert cycles(4) == pytest.approx((8 + 1 + 3) / 8), "4 steps hide 4 of 7 seconds"
    assert cycles(7, wire=20) == pytest.approx((8 + 1 + 14) / 8)
    assert cycles(0, fragments=2) == pytest.approx((8 + 2 * 8) / 8)


def test_every_fragment_is_hidden_behind_the_next_step_as_far_as_it_fits() -> None:
    cycle, sites = timeline.Cycle(4, 4, 1), timeline.Sites(FREE)
    step = timeline.Compute.of(10.0)

    def of(*wires: int) -> float:
        syncs = [timeline.Sync(job((1.0, wire)), 0.25, 0.25) for wire in wires]
        return timeline.cycle_seconds(cycle, syncs, step, sites, math.inf)

    # The training loop begins and applies each; its lane works and sends beside the next step.
    assert of(6, 6, 6, 6) == pytest.approx(10 + 0.5)
    assert of(6, 6, 6, 30) > of(6, 6, 6, 6), "the largest fragment is waited for"
    assert of(6, 6, 6, 30) == pytest.approx((4 * 10.5 + 21) / 4, rel=0.01)


SCHEDULES = ["localsgd(every=4)", "pqasgd(every=4, bits=4)", "periodic(every=4, exchange=topk(ratio=0.05))"]


@pytest.mark.parametrize("text", LINKS)
@pytest.mark.parametrize("method", SCHEDULES)
def test_a_sync_round_has_the_operations_and_bytes_of_a_real_one(method: str, text: str) -> None:
    size, link = 5, slowest_link(text)
    played = predict.periodic_profile(method, LONG, size, link=link, repeats=1)
    driver = Lockstep(size)
    sessions = [periodic_session(method, RankInfo(rank, size), LONG, link) for rank in range(size)]
    for _ in range(4):
        programs = [each.advance() for each in sessions]
    driver.run(programs)
    total = driver.meters[0].total
    assert played.rounds * 4 == pytest.approx(total.operations)
    assert played.payload_bytes * 4 == pytest.approx(total.payload_bytes + total.overhead_bytes, rel=0.02)


@pytest.mark.parametrize("more", ["", ", overlap=0", ", overlap=3"])
def test_the_fragments_of_a_cycle_have_the_operations_and_bytes_of_real_ones(more: str) -> None:
    size, method = 3, f"postlocal(every=4, warmup=0, fragments={len(SHAPES)}{more})"
    played = predict.periodic_profile(method, SHAPES, size, repeats=1)
    driver = Lockstep(size)
    sessions = [periodic_session(method, RankInfo(rank, size)) for rank in range(size)]
    for _ in range(4):
        programs = [each.advance() for each in sessions]
        if programs[0] is not None:
            driver.run(programs)
    total = driver.meters[0].total
    assert len(played.syncs) == len(SHAPES)
    assert played.rounds * 4 == pytest.approx(total.operations)
    assert played.payload_bytes * 4 == pytest.approx(total.payload_bytes + total.overhead_bytes, rel=0.02)
    assert all(sync.work > 0 for sync in played.syncs)


def test_the_fragments_of_a_model_that_is_played_in_part_have_their_own_sizes() -> None:
    shapes = {**{f"small{n}": (600, 600) for n in range(4)}, "large": (1400, 1400)}
    whole, part = (
        play_cycle(parse("localsgd(every=5, fragments=5)"), shapes, 2, dense_below=1024, repeats=0, most=most)
        for most in (10**7, 1)
    )
    for all_of, some in zip(whole.syncs, part.syncs, strict=True):
        assert sum(r.sent for r in some.job.rounds) == pytest.approx(
            sum(r.sent for r in all_of.job.rounds), rel=0.01
        )
    sent = [sum(each.sent for each in sync.job.rounds) for sync in whole.syncs]
    assert sent[-1] > 5 * sent[0]


def periodic_session(
    method: str, rank_info: RankInfo, shapes: Shapes = SHAPES, link: Link | None = None
) -> PeriodicSession:
    model = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = PeriodicSession(model, parse(method), optimizer, rank_info=rank_info, link=link)
    for number, parameter in enumerate(model.parameters()):
        rng = torch.Generator().manual_seed(number)
        parameter.data += torch.randn(parameter.shape, generator=rng)
    return session


@pytest.mark.usefixtures("counted_time")
def test_what_overlaps_is_not_waited_for() -> None:
    blocking, hidden = (
        predict.periodic_profile(f"pqasgd(every=8, bits=4{more})", SHAPES, 4) for more in ("", ", overlap=4")
    )
    slow = Link(latency=0.01, bandwidth=1e5)
    # Bytes and latencies of a sync round fit into four steps of 0.5 seconds.
    assert hidden.step_seconds(slow, 0.5) < blocking.step_seconds(slow, 0.5)
    assert hidden.step_seconds(slow, 0.5) == pytest.approx(0.5, rel=0.05)
    assert hidden.sent_bytes == blocking.sent_bytes


@pytest.mark.parametrize("method", ["laq(bits=4)", "slaq(bits=4)"])
def test_steps_that_a_lazy_method_skips_do_not_stand_for_those_it_sends(method: str) -> None:
    """Of ten turns with such gradients it skips some, which take the least work."""
    once, often = (predict.profile(method, SHAPES, 8, repeats=count) for count in (1, 10))
    assert (often.rounds, often.sent_bytes) == (once.rounds, once.sent_bytes)
    assert often.rounds > often.quieter().rounds


def test_a_part_of_a_large_model_is_reconciled(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {f"layer {number}": (300, 200) for number in range(12)}
    whole = predict.profile("a2sgd", shapes, 4, repeats=1).reconciliation
    monkeypatch.setattr(player, "WHOLE_SAMPLE", 100_000)
    part = predict.profile("a2sgd", shapes, 4, repeats=1).reconciliation
    assert part is not None
    assert whole is not None
    assert [each.cost for each in part.rounds] == [each.cost for each in whole.rounds]


@pytest.mark.usefixtures("counted_time")
@pytest.mark.parametrize("method", ["lag", "laq(bits=4)"])
def test_a_lazy_method_has_a_step_without_uploads(method: str) -> None:
    played = predict.profile(method, SHAPES, 4, repeats=2)
    assert played.quiet is not None
    assert played.quieter().sent_bytes < 0.1 * played.sent_bytes
    # The link is slow, so that bytes make the difference, not how long this machine took to compress them.
    low, seconds, high = played.interval(Link(latency=1e-3, bandwidth=1e5), 0.01)
    assert low < 0.5 * seconds
    assert seconds <= high


# -- break-even ----------------------------------------------------------------------------------------


def profile_with(work: float, sent: int, name: str) -> predict.Profile:
    one = Job((Round("all_reduce", work, sent, sent, sent, 0),), 0.0, False, 0.0)
    return predict.Profile(name, 2, ((one,),), (1.0,), "blocking")


def test_break_even_is_where_both_take_equally_long() -> None:
    dense = profile_with(0.0, 1_000_000, "dense")
    method = profile_with(1.0, 100_000, "method")
    found = predict.break_even_of(method, dense)
    assert found.verdict == "below"
    # 900 kB less, against one second of work.
    assert found.bandwidth == pytest.approx(900_000 * costs.TCP_FRAMING, rel=0.01)


def test_always_and_never_are_told_apart() -> None:
    dense = profile_with(0.5, 1000, "dense")
    assert predict.break_even_of(profile_with(0.1, 100, "less"), dense).verdict == "always"
    assert predict.break_even_of(profile_with(0.9, 2000, "more"), dense).verdict == "never"
    assert predict.break_even_of(dense, dense).verdict == "never"
    assert predict.break_even_bandwidth("dense", SHAPES, 4) is None


@pytest.mark.usefixtures("counted_time")
def test_speed_up_falls_with_the_bandwidth() -> None:
    ups = [predict.speed_up("topk", SHAPES, 4, Link(1e-5, bandwidth)) for bandwidth in (1e4, 1e6, 1e10)]
    assert ups[0] > ups[1] > ups[2]
    assert predict.speed_up("dense", SHAPES, 4, LINK) == 1.0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("tpok", SHAPES, 4), "did you mean 'topk'"),
        (("topk", SHAPES, 0), "one worker or more"),
        (("topk", {"w": (10**6, 10**6)}, 4), "too large to predict"),
    ],
)
def test_what_cannot_be_predicted_says_so(arguments: tuple, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        predict.profile(*arguments)
