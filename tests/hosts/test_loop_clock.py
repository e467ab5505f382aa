"""The clock of a training loop: typical steps, whatever happens between some of them."""

from __future__ import annotations

import pytest

from thinwire.hosts.loop_clock import LoopClock


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_with_an_evaluation_hardly_counts() -> None:
    time = Time()
    clock = LoopClock(time)
    assert clock.typical() == 0.0
    for step in range(10):
        assert clock.begins(step) == step
        time.now += 50.0 if step == 4 else 2.0
    assert clock.typical() == pytest.approx(2.0)
    clock.restart(10)
    assert clock.begins(10) == 0
    assert clock.typical() == 0.0


def test_the_steps_of_a_cycle_count_together() -> None:
    time = Time()
    clock = LoopClock(time)
    clock.restart(0, cycle=4)
    for step in range(13):
        clock.begins(step)
        time.now += 9.0 if step % 4 == 3 else 1.0  # a sync round
    assert clock.typical() == pytest.approx(3.0)


def test_several_forward_passes_of_a_step_are_one_step() -> None:
    time = Time()
    clock = LoopClock(time)
    for step in (0, 0, 1, 1, 2):
        clock.begins(step)
        time.now += 1.0
    assert clock.typical() == pytest.approx(2.0)


def test_what_the_loop_does_between_steps_is_known() -> None:
    time = Time()
    clock = LoopClock(time)
    for step in range(4):
        clock.begins(step)
        time.now += 1.0
        clock.stepped()
        time.now += 0.25
    assert clock.outside() == pytest.approx(0.25)
