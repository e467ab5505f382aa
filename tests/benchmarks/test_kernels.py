import os
import sys

import pytest

from benchmarks import kernels, side_effects
from benchmarks.kernel_cases import CASES

pytestmark = pytest.mark.skipif(
    os.environ.get("THINWIRE_KERNELS") == "reference", reason="about the compiled kernels"
)


def test_every_case_runs_and_the_progress_bar_names_it():
    seen = []
    rows = kernels.run(20_000, 1, seen.append, repeats=1)
    assert [row.name for row in rows] == [case.name for case in CASES]
    assert seen == [case.name for case in CASES]
    for row in rows:
        assert row.copies > 0
        assert row.gb_per_s > 0
        assert row.reference_ratio > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_error_feedback_needs_no_second_model():
    for memory in side_effects.peak_memory(4_000_000, steps=2):
        assert memory.share < 0.25, memory


def test_backward_is_timed_alone_beside_kernels_and_beside_python():
    overlap = side_effects.backward_overlap(2_000_000, duration=0.2)
    assert min(overlap.alone_ms, overlap.beside_kernels_ms, overlap.beside_python_ms) > 0
