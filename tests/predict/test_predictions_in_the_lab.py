"""Predicted step times against measured ones on real slow links: minutes, root, and a quiet machine."""

from __future__ import annotations

import pytest

from benchmarks import predictions
from thinwire.tools.lab import namespaces


@pytest.mark.slow
@pytest.mark.parametrize("link", predictions.LINKS)
def test_predicted_step_times_are_within_a_quarter_of_measured_ones(link: str) -> None:
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    rows = predictions.run([link])
    assert [row.method for row in rows] == list(predictions.METHODS)
    off = {
        row.method: f"{row.predicted:.4f} s, measured {row.measured:.4f} s" for row in rows if not row.passed
    }
    assert not off
