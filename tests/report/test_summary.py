"""What a report says about its records."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from tests.report.made import HANDFUL, Entrant, made
from thinwire.tools.compare.records import Records
from thinwire.tools.report import terminal, words
from thinwire.tools.report.curves import POINTS, evaluations, thinned, training_loss
from thinwire.tools.report.plots.tradeoff import frontier
from thinwire.tools.report.summary import Spread, speed_up, summarise, winner


def test_means_and_ranges_over_seeds() -> None:
    records = made(seeds=3)
    one = summarise(records)[0]
    taken = [run.target_seconds for run in records.runs_of("dense")]
    assert one.seeds == 3
    assert one.target_seconds is not None
    known = [value for value in taken if value is not None]
    assert len(known) == 3
    assert one.target_seconds.mean == pytest.approx(sum(known) / 3)
    assert (one.target_seconds.low, one.target_seconds.high) == (min(known), max(known))


def test_a_missing_value_leaves_no_mean() -> None:
    assert Spread.of([1.0, None]) is None
    assert Spread.of([]) is None
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)


def test_the_winner_is_the_first_at_the_target() -> None:
    records = made()
    summaries = summarise(records)
    best = winner(summaries, records.setting)
    assert best is not None
    assert best.method == "powersgd(rank=2)"
    times = {run.method: run.target_seconds for run in records.runs}
    gain = speed_up(best, summaries[0], records.setting)
    fastest = min(seconds for seconds in times.values() if seconds is not None)
    assert times[best.method] == fastest
    assert gain == pytest.approx((times["dense"] or math.nan) / fastest)
    said = words.conclusion(summaries, records.setting)
    assert said.startswith("powersgd(rank=2) was first to 97\u00a0%")
    assert words.units.times(gain or 0) in said


def test_a_seed_that_fails_or_misses_the_target_cannot_win() -> None:
    records = made(seeds=2)
    broken = [
        replace(run, failed="gone") if (run.method, run.seed) == ("powersgd(rank=2)", 1) else run
        for run in records.runs
    ]
    summaries = summarise(replace(records, runs=broken))
    best = winner(summaries, records.setting)
    assert best is not None
    assert best.method != "powersgd(rank=2)"
    missed = [
        replace(run, target_step=None, target_seconds=None, target_sent=None)
        if (run.method, run.seed) == ("powersgd(rank=2)", 1)
        else run
        for run in records.runs
    ]
    best = winner(summarise(replace(records, runs=missed)), records.setting)
    assert best is not None
    assert best.method != "powersgd(rank=2)"


def test_without_a_target_only_those_as_good_as_the_baseline_can_win() -> None:
    hasty = Entrant("signsgd(scale='rms')", 0.001, 0.0, ceiling=0.8)
    records = made((*HANDFUL[:2], hasty), target=None)
    summaries = summarise(records)
    assert min(summaries, key=lambda one: one.seconds.mean if one.seconds else 0).method == hasty.method
    best = winner(summaries, records.setting)
    assert best is not None
    assert best.method == "fp16"


def test_a_baseline_that_wins_is_called_the_winner() -> None:
    slow = Entrant("topk(ratio=0.01)", 1.0, 0.5)
    records = made((HANDFUL[0], slow), target=None)
    assert "none of the others is better" in words.conclusion(summarise(records), records.setting)


def test_nobody_at_the_target() -> None:
    records = made(target=0.9999)
    assert winner(summarise(records), records.setting) is None
    assert words.conclusion(summarise(records), records.setting).startswith("No method reached")


def test_bytes_that_nobody_counted_are_no_zeros() -> None:
    records = made()
    runs = [replace(run, sent=0, received=0, payload=0.0, rounds=0.0) for run in records.runs]
    for one in summarise(replace(records, runs=runs)):
        assert one.sent is None
        assert one.received is None
        assert one.rounds is None


def test_curves_are_thinned_and_keep_both_ends() -> None:
    assert thinned(range(1, 8)) == list(range(1, 8))
    kept = thinned(range(1, 5001))
    assert (kept[0], kept[-1]) == (1, 5000)
    assert len(kept) <= POINTS + 1


def test_curves_of_failed_runs_end_where_they_failed() -> None:
    records = made((*HANDFUL[:1], Entrant("randomblock(ratio=0.1)", 0.1, 0.001, fails_at=37)))
    curve = evaluations(records, "randomblock(ratio=0.1)", "accuracy")
    assert curve.failed
    assert curve.points[-1].step == 37
    loss = training_loss(records, "randomblock(ratio=0.1)")
    assert all(math.isfinite(point.value) for point in loss.points)
    assert not evaluations(records, "dense", "accuracy").failed


def test_no_point_is_a_mean_of_fewer_seeds() -> None:
    records = made(HANDFUL[:1], seeds=2)
    cut = [each for each in records.evaluations if each.seed == 0 or each.step <= 50]
    curve = evaluations(Records(records.setting, records.steps, cut, records.runs), "dense", "accuracy")
    assert curve.points[-1].step == 50


def test_the_frontier_has_what_nothing_beats() -> None:
    points = [(10.0, 0.9), (5.0, 0.95), (1.0, 0.8), (5.0, 0.7), (20.0, 0.96)]
    assert frontier(points, made().setting) == [2, 1, 4]
    assert frontier(points, made(measure="perplexity").setting) == [2, 3]


WORSE = Entrant("signsgd(scale='rms')", 0.001, 0.0, ceiling=0.93)


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_speed_up_with_a_clearly_worse_result_carries_a_warning(seeds: int) -> None:
    records = made((*HANDFUL[:2], WORSE), target=None, seeds=seeds)
    dense, fp16, hasty = summarise(records)
    assert (dense.worse, fp16.worse) == (None, None)
    assert hasty.speed_up is not None
    assert hasty.speed_up > 1
    assert dense.measure is not None
    assert hasty.measure is not None
    assert hasty.worse == pytest.approx(dense.measure.mean - hasty.measure.mean)
    said = words.worse_text(hasty, records.setting)
    assert said == f"{100 * hasty.worse:.1f} points worse than dense"
    assert terminal.rows(records)[2][-1].endswith("x !")
    assert terminal.warnings(records) == [f"! {WORSE.method}: {said}"]


def test_one_seed_as_good_as_one_of_the_baselines_is_not_clearly_worse() -> None:
    records = made((HANDFUL[0], WORSE), target=None, seeds=3)
    best = max(run.accuracy for run in records.runs)
    lucky = [
        replace(run, accuracy=best) if (run.method, run.seed) == (WORSE.method, 1) else run
        for run in records.runs
    ]
    assert summarise(records)[1].worse is not None
    assert summarise(replace(records, runs=lucky))[1].worse is None


def test_a_higher_perplexity_is_worse() -> None:
    records = made(HANDFUL[:2], target=None, measure="perplexity")

    def with_perplexity(factor: float) -> float | None:
        base = records.runs[0].perplexity
        runs = [records.runs[0], replace(records.runs[1], perplexity=factor * base)]
        return summarise(replace(records, runs=runs))[1].worse

    assert with_perplexity(0.5) is None
    assert with_perplexity(1.015) is None
    assert with_perplexity(1.1) == pytest.approx(1.1)


def test_runs_to_a_target_are_not_worse() -> None:
    assert all(one.worse is None for one in summarise(made()))


def test_without_a_baseline_the_best_result_is_the_standard() -> None:
    records = made((WORSE, *HANDFUL[:2]), target=None, baseline=False)
    summaries = summarise(records)
    assert all((one.baseline, one.speed_up, one.worse) == (None, None, None) for one in summaries)
    best = winner(summaries, records.setting)
    assert best is not None
    assert best.method == "fp16"
    assert "within 1 point of the best result" in words.conclusion(summaries, records.setting)


CONTROLS = (HANDFUL[0], Entrant("alone", 0.002, 0.0, ceiling=0.9))


def test_the_part_of_the_gap_that_a_method_recovers() -> None:
    """Against a worker alone and the baseline, at the last step that all three were tested at."""
    close = Entrant("topk(ratio=0.01)", 0.01, 0.01)
    far = Entrant("pqasgd(every=8, bits=4)", 0.003, 0.01, ceiling=0.91)
    records = made((*CONTROLS, close, far), target=None)
    step = max(test.step for test in records.evaluations)
    at_end = {test.method: test.accuracy for test in records.evaluations if test.step == step}
    gap = at_end["dense"] - at_end["alone"]
    assert gap > 0
    summaries = {one.method: one for one in summarise(records)}
    for method in (close.method, far.method):
        expected = (at_end[method] - at_end["alone"]) / gap
        assert summaries[method].recovered == pytest.approx(expected)
    assert summaries["dense"].recovered is None
    assert summaries["alone"].recovered is None
    assert terminal.header(records)[-1] == "of gap"
    shown = {row[0]: row[-1] for row in terminal.rows(records)}
    assert shown["dense"] == shown["alone"] == "-"
    assert shown[close.method].endswith("%")
    assert shown[far.method].endswith("% !")
    assert [line for line in terminal.warnings(records) if "recovers" in line and far.method in line]


def test_neither_a_worker_alone_nor_what_recovers_little_can_win() -> None:
    """Both are faster and within a point of the baseline here."""
    alone = Entrant("alone", 0.002, 0.0, ceiling=0.98)
    late = Entrant("delayed(method=topk(ratio=0.01))", 0.003, 0.0, ceiling=0.981)
    records = made((HANDFUL[0], alone, late, HANDFUL[1]), target=None)
    summaries = summarise(records)
    recovered = {one.method: one.recovered for one in summaries}
    assert recovered[late.method] is not None
    assert recovered[late.method] < 0.5
    best = winner(summaries, records.setting)
    assert best is not None
    assert best.method in (HANDFUL[0].method, HANDFUL[1].method)


def test_a_small_gap_is_said_to_be_small() -> None:
    far, near = made((*CONTROLS, HANDFUL[1]), target=None), Entrant("alone", 0.002, 0.0, ceiling=0.982)
    assert not [line for line in terminal.warnings(far) if "chance" in line]
    close = made((HANDFUL[0], near, HANDFUL[1]), target=None)
    gap = close.control_gap()
    assert gap is not None
    assert 0 < gap < 0.01
    (line,) = [line for line in terminal.warnings(close) if "chance" in line]
    assert f"{100 * gap:.1f} points behind dense" in line


def test_without_a_gap_nothing_is_said_about_it() -> None:
    better = Entrant("alone", 0.002, 0.0, ceiling=0.99)
    records = made((HANDFUL[0], better, HANDFUL[1]), target=None)
    assert all(one.recovered is None for one in summarise(records))
    assert "of gap" not in terminal.header(made())
