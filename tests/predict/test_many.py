"""Very many workers: extrapolated operations are those of the simulator, and all wait for the slowest."""

from __future__ import annotations

import random
import statistics
import sys

import pytest

from benchmarks import scale
from thinwire import predict
from thinwire.net.costs import Link
from thinwire.predict import many, player
from thinwire.predict.mirror import Job, Round
from thinwire.predict.stragglers import largest, slowest

LINK = Link(1e-3, 1e6)
PROFILES = sys.modules["thinwire.predict.profiles"]  # a function of the package has the same name
# A sum, whole payloads, pieces for all: each kind of operation.
METHODS = (
    "dense",
    "powersgd(rank=2)",
    "topk(ratio=0.05, reduce='gather')",
    "topk(ratio=0.05, reduce='split')",
    "qsgd(bits=4, bucket=64)",
    "signsgd",
    "terngrad",
    "hierarchical(outer=qsgd(bits=4, bucket=64), local=2)",
)


@pytest.mark.parametrize("method", METHODS)
def test_a_few_workers_tell_the_bytes_of_many(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROFILES, "MEASURED_WORKERS", (6, 8))
    monkeypatch.setattr(PROFILES, "PLAYED_WORKERS", (8, 16))
    found, simulated = (f(method, 48, 40_000, LINK) for f in (scale.extrapolate, scale.measure))
    assert found.rounds == simulated.rounds
    # Pieces are cut at whole bytes or buckets, and padded: in a small model that is several percent.
    assert found.sent_bytes == pytest.approx(simulated.sent_bytes, rel=0.08)
    assert found.link_seconds == pytest.approx(simulated.link_seconds, rel=0.08)
    # One rank's own piece stands for those that all others have for it, and every rank's entries are random.
    assert found.received_bytes == pytest.approx(simulated.received_bytes, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "powersgd(rank=2)", "scalecom", "randomblock(ratio=0.1)"])
def test_the_simulator_agrees_up_to_4096_workers(method: str) -> None:
    found, simulated = (f(method, 4096, 4096, LINK) for f in (scale.extrapolate, scale.measure))
    assert found.rounds == simulated.rounds
    assert found.sent_bytes == pytest.approx(simulated.sent_bytes, rel=0.05)
    assert found.link_seconds == pytest.approx(simulated.link_seconds, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["topk(ratio=0.05, reduce='split')", "qsgd(bits=4)", "signsgd", "terngrad"]
)
def test_the_simulator_agrees_on_pieces_for_512_workers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROFILES, "PLAYED_WORKERS", (96, 192))
    found, simulated = (f(method, 512, 100_000, LINK) for f in (scale.extrapolate, scale.measure))
    assert found.rounds == simulated.rounds
    assert found.sent_bytes == pytest.approx(simulated.sent_bytes, rel=0.1)


@pytest.mark.parametrize("method", ["signsgd", "terngrad"])
def test_many_workers_do_not_gather_whole_codes(method: str) -> None:
    """300 workers: a gather would send 299 codes of 1 or 2 bits per entry."""
    few, more = (scale.extrapolate(method, count, 100_000, LINK) for count in (8, 300))
    assert more.sent_bytes < 2.5 * few.sent_bytes


def job(operation: str, payload: int, sent: int, work: float) -> Job:
    return Job((Round(operation, work, payload, sent, sent, 1),), work, True, 0.0)


def test_decoding_of_whole_payloads_grows_and_that_of_sums_does_not() -> None:
    gathers = [(count, job("all_gather", 4000, 4000 * count, 1e-3 * count)) for count in (16, 64)]
    assert many.only_gathers(gathers[0][1], gathers[1][1])
    found = many.job_for(1024, gathers, None)
    assert found.closing == pytest.approx(1.024)
    sums = [(count, job("all_reduce", 4000, 8000, 1e-3 * count)) for count in (16, 64)]
    assert many.job_for(1024, sums, None).closing == pytest.approx(0.016)


def test_lengths_before_whole_payloads_are_gathered_by_any_number_of_workers() -> None:
    """Otherwise hundreds of payloads would have to be played and decoded to see that."""
    length, whole, short = (Round("all_gather", 0.0, n, n, n, 1) for n in (8, 4000, 100))

    def stays(*rounds: Round) -> bool:
        each = Job(rounds, 0.0, True, 0.0)
        return many.only_gathers(each, each)

    assert stays(length, whole)
    assert not stays(length, short), "short payloads may be sent in another way"
    assert not stays(whole, length)


def test_reconciling_very_many_replicas_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    really = predict.profile("a2sgd", {"matrix": (60, 50)}, 48, repeats=1).reconciliation
    monkeypatch.setattr(player, "RECONCILED_WORKERS", (6, 12))
    found = predict.profile("a2sgd", {"matrix": (60, 50)}, 48, repeats=1).reconciliation
    assert really is not None
    assert found is not None
    costs = [[(r.operation, r.payload, r.sent, r.hops) for r in each.rounds] for each in (really, found)]
    assert costs[0] == costs[1]


def test_a_piece_takes_what_more_pieces_take_longer() -> None:
    measured = [(count, job("all_to_all", 4000, 4000, 1.0)) for count in (16, 64)]
    sent = {count: round((6_440 + 10 * count) * (count - 1) / count) for count in (256, 1024)}
    played = [
        (256, job("all_to_all", 9000, sent[256], 0.1)),
        (1024, job("all_to_all", 16680, sent[1024], 0.484)),
    ]
    assert not many.only_gathers(measured[0][1], measured[1][1])
    found = many.job_for(4096, measured, played)
    # Work is counted before and after the operation: 1 ms for each of 4,032 further pieces.
    assert found.work == pytest.approx(2.0 + 4.032)
    # 6,440 bytes and 10 for each rank, but for the piece that stays here.
    assert found.rounds[0].sent == pytest.approx((6_440 + 10 * 4096) * 4095 / 4096, rel=1e-3)
    assert found.rounds[0].hops == 4095


def test_the_slowest_of_many_is_where_draws_find_it() -> None:
    rng = random.Random(0)
    for count in (4, 64):
        found = statistics.median(max(rng.gauss(0, 1) for _ in range(count)) for _ in range(2000))
        assert largest(count) == pytest.approx(found, abs=0.08)
    assert largest(65536) == pytest.approx(4.26, abs=0.05)


def test_stragglers_hold_up_more_workers_longer_and_seldom_syncs_less() -> None:
    assert slowest(64, 0.0) == (1.0, 1.0, 1.0)
    usual = [slowest(count, 0.2).usual for count in (2, 64, 65536)]
    assert 1 < usual[0] < usual[1] < usual[2]
    assert slowest(64, 0.2, steps=100).usual < 1 + (usual[1] - 1) / 5
    low, middle, high = slowest(64, 0.2)
    assert low < middle < high
