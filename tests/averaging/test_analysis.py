"""The conditions of the analysis: bounds, the method's p and q, and what `attach` says of them."""

import logging
import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire
from tests.hosts.common import mlp
from thinwire import ConfigError, parse
from thinwire.averaging import conditions
from thinwire.averaging.analysis import relative_variance
from thinwire.averaging.clock import Clock
from thinwire.net.launch import Worker, run_local


@given(
    p=st.integers(1, 500),
    workers=st.integers(1, 300),
    steps=st.integers(1, 10**9),
    constant=st.sampled_from([1.0, 4.0]),
)
def test_p_is_met_up_to_its_bound_and_from_the_stated_steps_on(
    p: int, workers: int, steps: int, constant: float
) -> None:
    found = conditions(f"localsgd(every={p})", workers, steps, constant=constant)
    assert found.p.value == p
    assert found.p.bound is not None
    if not math.isclose(p, found.p.bound):
        assert found.p.met == (p <= found.p.bound)
    assert found.p.met == (steps >= found.covered_from)
    assert found.met == found.p.met
    at = conditions(f"localsgd(every={p})", workers, found.covered_from, constant=constant)
    assert at.met
    if p > 1 and found.covered_from > 1:
        before = conditions(f"localsgd(every={p})", workers, found.covered_from - 1, constant=constant)
        assert before.met is False
        assert before.p.bound < p * (1 + 1e-9)


def test_known_figures() -> None:
    """K >= p^4 M^3: 8^4 4^3 = 262,144 steps for 4 workers that average every eighth step."""
    assert conditions("localsgd(every=8)", 4).covered_from == 262_144
    found = conditions("localsgd(every=8)", 4, 262_144)
    assert found.p.bound == pytest.approx(8)
    assert found.met
    assert conditions("localsgd(every=8)", 4, 262_143).met is False
    assert conditions("localsgd(every=8)", 4, 1024, constant=4).covered_from == 1024


def test_full_communication_is_always_covered() -> None:
    for method in (
        "localsgd(every=1)",
        "spasgd(groups=1)",
        "pqasgd(every=1, bits=8)",
        "qsgd(bits=8)",
        "dense",
    ):
        for steps in (None, 1, 10**6):
            assert conditions(method, 64, steps).met


@pytest.mark.parametrize(
    ("method", "q"),
    # Measured figures of the quantiser on Gaussian buckets.
    [
        ("qsgd(bits=2, bucket=512, norm='l2')", 17.1),
        ("qsgd(bits=2, bucket=512)", 1.59),
        ("dense", 0.0),
        ("randomk(ratio=0.1, feedback=False)", 9.0),
    ],
)
def test_q_of_known_methods(method: str, q: float) -> None:
    assert relative_variance(parse(method)) == pytest.approx(q, rel=0.05)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("bucket", [64, 512])
def test_q_is_below_what_is_proven_of_the_quantiser(bits: int, bucket: int) -> None:
    s = 2 ** (bits - 1) - 1
    for norm in ("l2", "max"):
        found = relative_variance(parse(f"qsgd(bits={bits}, bucket={bucket}, norm={norm!r})"))
        assert 0 < found <= min(bucket / s**2, math.sqrt(bucket) / s)


def test_q_does_not_depend_on_steps_and_is_told_without_them() -> None:
    found = conditions("pqasgd(every=4, bits=1)", 2)
    assert found.p.met is None
    assert found.p.bound is None
    assert found.q.met is False
    assert found.met is False
    assert "q = 9.6" in str(found)
    assert "p =" not in str(found), "only what is wrong is told"
    assert conditions("pqasgd(every=4, bits=1)", 2, constant=16).q.met


def test_the_words() -> None:
    unknown = conditions("spasgd(groups=2)", 4)
    assert unknown.met is None
    assert str(unknown) == (
        "spasgd(groups=2) with 4 workers is within the conditions for the rate of full communication from "
        "1,024 steps on (up to constants): p = 2 <= K^(1/4) M^(-3/4); q = 0 <= 1"
    )
    outside = conditions("spasgd(groups=2)", 4, 1000)
    assert str(outside) == (
        "spasgd(groups=2) with 4 workers and 1,000 steps is outside the conditions for the rate of full "
        "communication (up to constants): p = 2 > K^(1/4) M^(-3/4) = 1.99, which takes 1,024 steps"
    )
    assert "p = 2 <= 2 K^(1/4) M^(-3/4) = 3.98" in str(conditions("spasgd(groups=2)", 4, 1000, constant=2))
    with pytest.raises(FrozenInstanceError):
        outside.steps = 3


def waits(method: str, steps: int) -> int:
    """The most steps between two averages of a fragment are applied, by the clock."""
    schedule = parse(method)
    clock, last, longest = Clock(schedule, seed=3), dict.fromkeys(range(schedule.fragment_count), 0), 0
    for _ in range(steps):
        due, delay, _ = clock.tick()
        for fragment in due:
            # What is applied is the average of the parameters at the sync round, after local steps from the
            # one before, which was applied `delay` steps late.
            longest = max(longest, clock.step - last[fragment] + delay)
            last[fragment] = clock.step
    return longest


@pytest.mark.parametrize(
    "method",
    [
        "localsgd(every=5)",
        "pqasgd(every=6, fragments=2, overlap=3)",
        "localsgd(every=6, fragments=3)",
        "spasgd(groups=5)",
        "spasgd(groups=5, order='shuffled')",
    ],
)
def test_staleness_is_what_the_clock_shows(method: str) -> None:
    assert waits(method, 4000) == parse(method).staleness


@pytest.mark.parametrize(
    "method",
    ["diloco", "periodic(exchange=topk)", "topk", "periodic(exchange=qsgd, outer_lr=0.7)", "qsgd(bits=3)"],
)
def test_what_is_not_analysed_is_refused(method: str) -> None:
    with pytest.raises(ConfigError):
        conditions(method, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be a whole number from 1 up"),
        ({"workers": 2, "steps": 0}, "steps must be a whole number from 1 up"),
        ({"workers": 2, "constant": 0}, "constant must be a finite number above 0"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        conditions("localsgd", **options)


# -- attach --------------------------------------------------------------------------------------------------

SAID = (
    ("pqasgd(every=2, bits=8)", None, "INFO", "from 128 steps on"),
    ("pqasgd(every=2, bits=8)", 127, "WARNING", "p = 2 >"),
    ("pqasgd(every=2, bits=8)", 128, "INFO", "p = 2 <="),
    ("pqasgd(every=2, bits=1)", None, "WARNING", "q = 9.61 > 1"),
    ("spasgd(groups=4)", 100, "WARNING", "p = 4 >"),
    ("localsgd(every=4)", 100, "WARNING", "p = 4 >"),
    ("diloco(every=4)", None, "", ""),
)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelname, record.getMessage()))


def attached(worker: Worker) -> list[list[tuple[str, str]]]:
    found = []
    for method, steps, _, _ in SAID:
        lines, logger = Lines(), logging.getLogger("thinwire")
        logger.addHandler(lines)
        logger.setLevel(logging.INFO)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        thinwire.attach(model, method, optimizer=optimizer, steps=steps).detach()
        logger.removeHandler(lines)
        found.append([line for line in lines.found if "conditions" in line[1]])
    with pytest.raises(ConfigError, match="steps must be a whole number from 1 up, not 0"):
        thinwire.attach(mlp(), "localsgd", optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1), steps=0)
    return found


def test_attach_says_it_once_on_rank_0() -> None:
    first, second = run_local(attached, 2, timeout=400)
    assert not any(second)
    for (method, steps, level, words), lines in zip(SAID, first, strict=True):
        if not level:
            assert not lines, method
            continue
        ((found, text),) = lines
        assert found == level, f"{method}, {steps}: {text}"
        assert words in text
