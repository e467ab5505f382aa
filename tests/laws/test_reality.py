"""Real gloo processes agree with the lock-step run to rounding, and with each other bit for bit."""

import pytest
import torch

from tests.laws.cohort import (
    ALSO,
    CONFIGURATIONS,
    DEFAULTS,
    SHAPES,
    Cohort,
    same_state,
    second_of_a_kind,
)
from thinwire import Session, parse
from thinwire.methods import Sketched
from thinwire.net.launch import Worker, run_local

STEPS = 3


def average_everything(worker: Worker, methods: tuple[str, ...], given: list) -> dict[str, list]:
    """Every method, a few steps each, in one set of processes."""
    results = {}
    for method in methods:
        session = Session([(n, torch.empty(s)) for n, s in SHAPES.items()], method, dense_below=0)
        results[method] = [session.average(step[worker.rank]) for step in given]
        session.detach()
    return results


SECOND = second_of_a_kind(CONFIGURATIONS)
VARIANTS = tuple(text for text in ALSO if text not in SECOND)


def selects_by_rounded_sums(method: str) -> bool:
    """A table in 16 bits is summed in another order by gloo, so that other entries may be the largest."""
    exchange = parse(method)
    return isinstance(exchange, Sketched) and exchange.wire != "fp32"


@pytest.mark.parametrize(
    ("methods", "size"),
    [
        pytest.param(DEFAULTS, 2, marks=pytest.mark.quick, id="defaults-2"),
        pytest.param(VARIANTS, 2, id="variants-2"),
        pytest.param(tuple(SECOND), 2, marks=pytest.mark.slow, id="others-2"),
        pytest.param(CONFIGURATIONS, 4, marks=pytest.mark.slow, id="all-4"),
    ],
)
def test_reality(methods: tuple[str, ...], size: int) -> None:
    given = [Cohort("dense", size).inputs(step) for step in range(STEPS)]
    everybody = run_local(average_everything, size, methods, given, timeout=400)
    for method in methods:
        cohort = Cohort(method, size)
        for step in range(STEPS):
            real = [results[method][step] for results in everybody]
            if parse(method).traits.consensus:
                assert all(same_state(real[0], other) for other in real), f"{method}: ranks differ"
            if size > 2 and selects_by_rounded_sums(method):
                continue
            tolerance = 8 * size * parse(method).rounding
            for rank, expected in enumerate(cohort.average(given[step])):
                for name, tensor in expected.items():
                    scale = 1 + tensor.abs().max()
                    difference = (real[rank][name] - tensor).abs().max()
                    assert difference < tolerance * scale, f"{method}, step {step}, {name}: {difference}"
