"""What an operation costs besides its messages decides between fewer operations and fewer bytes."""

import math
from dataclasses import replace

import pytest
import torch

from tests.laws.cohort import Cohort
from thinwire.net.costs import Link

SIZE = 5
SLOW = Link(latency=1e-6, bandwidth=1e5)
"""Bytes decide."""
SHAPES = {"weight": (200, 400), "bias": (400,)}


def operations(method: str, link: Link) -> int:
    cohort = Cohort(method, SIZE, SHAPES, dense_below=1024)
    for session in cohort.sessions:
        session.engine.link = link
    cohort.average(cohort.inputs(0))
    before = cohort.driver.meters[0].rounds
    cohort.average(cohort.inputs(1))
    return cohort.driver.meters[0].rounds - before


@pytest.mark.parametrize("method", ["topk(ratio=0.05)", "qsgd(bits=4)", "gaussiank(ratio=0.05)"])
def test_costly_operations_are_spared(method: str) -> None:
    few = 2 if method.startswith("gaussiank") else 1  # a round of lengths
    assert operations(method, replace(SLOW, operation=math.inf)) == few
    assert operations(method, SLOW) > few


def test_a_decision_by_operations_changes_no_result() -> None:
    """Up to the order of sums: with and without a split of codes that lose nothing."""
    found = []
    for link in (SLOW, replace(SLOW, operation=math.inf)):
        cohort = Cohort("topk(ratio=1.0)", SIZE, SHAPES, dense_below=1024)
        for session in cohort.sessions:
            session.engine.link = link
        found.append(cohort.average(cohort.inputs(0))[0])
    for name, mean in found[0].items():
        torch.testing.assert_close(mean, found[1][name])
