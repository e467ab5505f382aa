"""The rules of lazy aggregation: what they compare, and when nothing may be skipped."""

import math
from types import SimpleNamespace

import pytest

from thinwire.methods import LAQ, SLAQ
from thinwire.methods.families import lazy_rules as rules
from thinwire.methods.families.lazy import Counts


def test_the_bound_measures_past_steps_by_the_rate() -> None:
    assert rules.bound(0.5, 8.0, 2.0) == 1.0
    assert rules.bound(0.5, 8.0, 0.0) == 0.0, "without a step nothing is known of the next one"
    assert rules.bound(0.0, 8.0, 1.0) == 0.0


def test_a_change_is_skipped_up_to_what_is_allowed() -> None:
    assert rules.skips(1.0, 1.0)
    assert not rules.skips(math.nextafter(1.0, 2.0), 1.0)
    assert not rules.skips(0.0, 0.0), "xi = 0 is plain gradient descent"
    assert not rules.skips(math.nan, 1.0)
    assert not rules.skips(math.inf, 1.0)


def test_silence_ends_after_max_skip() -> None:
    assert rules.skips(0.0, 1.0, silence=2, max_skip=3)
    assert not rules.skips(0.0, 1.0, silence=3, max_skip=3)
    assert not rules.skips(0.0, 1.0, silence=0, max_skip=0)


def test_codes_may_lose_so_much() -> None:
    counts = Counts(error=0.5, noise=4.0)
    step = SimpleNamespace(bound=lambda xi: xi, error=0.25, counts=counts)
    assert LAQ(xi=1.0, window=1).allowed(step) == 1.0 + 3 * 0.75
    assert SLAQ(xi=1.0, window=1, allowance=2.0).allowed(step) == 1.0 + 1.5 * 0.75 + 2.0
    assert SLAQ(xi=1.0, window=1).allowed(step) == pytest.approx(1.0 + 1.5 * 0.75 + 1.1 * 4.0), (
        "measured noise"
    )


def test_movement_bounds_the_change_of_the_gradient() -> None:
    assert rules.change_by_movement(3.0, 4.0) == 36.0
