import os
import sys

import pytest

from benchmarks import kernels as bench

pytestmark = pytest.mark.skipif(
    os.environ.get("THINWIRE_KERNELS") == "reference", reason="about the compiled kernels"
)


def test_every_case_runs_and_is_told_to_the_progress_line():
    seen = []
    rows = bench.run(20_000, 1, lambda name, done, total: seen.append((name, done, total)), repeats=1)
    assert [row.name for row in rows] == [case.name for case in bench.CASES]
    assert seen[-1] == ("", len(rows), len(rows))
    for row in rows:
        assert row.copies > 0
        assert row.gb_per_s > 0
        assert row.reference_ratio > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_error_feedback_needs_no_second_model():
    for memory in bench.peak_memory(4_000_000, steps=2):
        assert memory.share < 0.25, memory


def test_backward_continues_beside_a_kernel():
    overlap = bench.backward_overlap(2_000_000, seconds=0.2)
    assert overlap.alone_ms > 0
    assert overlap.beside_kernels_ms > 0
