"""A short part of `make chaos`: two faults of each kind, with four ranks."""

import pytest

from tests.chaos.__main__ import outcomes
from tests.chaos.judge import violations
from tests.chaos.scenarios import FAULTS, Scenario, draw
from tests.chaos.worker import Report

WORKERS = 4


@pytest.mark.timeout(900)
def test_seeded_faults_break_nothing() -> None:
    scenarios = draw(2 * len(FAULTS), seed=1, workers=WORKERS)
    found = list(outcomes(scenarios, WORKERS))
    assert [scenario for scenario, _, _ in found] == scenarios
    broken = [f"{scenario.label}: {what}" for scenario, _, wrong in found for what in wrong]
    assert not broken, "\n".join(broken)
    # A hostile payload needs a method that sends frames; everything else happens in any case.
    assert sum(fired for _, fired, _ in found) >= len(found) - 2


def test_the_same_seed_draws_the_same_faults() -> None:
    assert draw(30, 5, WORKERS) == draw(30, 5, WORKERS) != draw(30, 6, WORKERS)


def scenario(fault: str, **options: object) -> Scenario:
    return Scenario(0, fault, "ddp", "topk(ratio=0.2)", culprit=1, step=4, seconds=0.0, **options)


def told(rank: int, **options: object) -> Report:
    blamed = "all_gather failed: no word from rank 1: dead"
    return Report(rank, **{"kind": "PeerError", "error": blamed, "step": 4, "model": "a"} | options)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([told(0), told(2)], ""),
        ([told(0)], "rank 2 hangs or has crashed"),
        ([told(0), told(2, error="no word from rank 3: dead")], "rank 2: blames rank [3]"),
        ([told(0), told(2, kind="", error="")], "rank 2: did not notice the kill"),
        ([told(0), told(2, kind="RuntimeError")], "rank 2: raised RuntimeError"),
        ([told(0), told(2, seconds=60.0)], "rank 2: took 60.0 s to notice"),
        ([told(0), told(2, step=3)], "ranks have committed different steps: [3, 4]"),
        ([told(0), told(2, model="b")], "replicas differ after step 4"),
        ([told(0), told(2, residuals_kept=False)], "rank 2: residuals changed"),
        ([told(0), told(2, readable="state_dict raises")], "rank 2: no clean state"),
        ([told(0), told(2, threads=["thinwire-lane"])], "rank 2: threads are left"),
    ],
)
def test_every_broken_invariant_is_told(reports: list[Report], expected: str) -> None:
    found = violations(scenario("kill"), {report.rank: report for report in reports}, workers=3)
    assert found == [] if not expected else any(expected in what for what in found)


def test_a_checkpoint_that_is_not_the_newest_intact_one_is_told() -> None:
    ranks = {rank: told(rank, kind="", error="", resumed=6) for rank in range(3)}
    assert violations(scenario("torn file"), ranks, workers=3) == []
    ranks[2].resumed = 8
    assert violations(scenario("torn file"), ranks, workers=3) == ["rank 2 resumed from step 8, not 6"]
