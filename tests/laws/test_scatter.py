"""The laws of `reduce_scatter`, for the methods whose traits claim it."""

import math

import torch

from tests.laws.cohort import DEFAULTS, SIZES, Cohort, every, named, second_of_a_kind
from thinwire import parse

SCATTERS = named(lambda traits: traits.scatters)


def gradients(size: int, n: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What every rank has: one row for each rank, n entries each, with a heavy tail."""
    rng = torch.Generator().manual_seed(size)
    return [(torch.randn(size, n, generator=rng) ** 3).to(dtype) for _ in range(size)]


def scattered(cohort: Cohort, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each rank's own row of the mean."""
    outputs = [torch.empty_like(rows[0]) for rows in given]
    programs = []
    for session, rows, out in zip(cohort.sessions, given, outputs, strict=True):
        session.engine.begin_step()
        programs.append(session.engine.scatter_program("layer", list(rows), out))
    cohort.driver.run(programs)
    for session in cohort.sessions:
        session.engine.end_step(session.engine.scattered_finite())
    return outputs


def cohort_of(method: str, size: int, **options: int) -> Cohort:
    return Cohort(method, size, {"layer": (size, 301)}, **options)


@every(SCATTERS, quick=DEFAULTS, size=SIZES, n=(301, 1, 0))
def test_each_rank_gets_its_own_stretch_of_the_mean(method: str, size: int, n: int) -> None:
    cohort, given = cohort_of(method, size), gradients(size, n)
    before = [rows.clone() for rows in given]
    outputs = scattered(cohort, given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True)), "the input was changed"
    for rank, out in enumerate(outputs):
        rows = torch.stack([theirs[rank] for theirs in given])
        mean = rows.mean(0)
        if parse(method).traits.exact_mean:
            assert torch.allclose(out, mean, rtol=1e-5, atol=1e-6)
        elif n:  # nothing is far outside of what the ranks have; signs may stand for 1
            assert (out.abs() <= max(1.0, 1.01 * float(rows.abs().max()) * math.sqrt(n))).all()
            assert n < 100 or float((out * mean).sum()) > 0


UNBIASED = named(lambda traits: traits.scatters and traits.unbiased)


@every(UNBIASED, quick=DEFAULTS, slow=second_of_a_kind(UNBIASED))
def test_the_expectation_is_the_mean(method: str) -> None:
    size, trials = 3, 300
    cohort, given = cohort_of(method, size), gradients(size, 60)
    runs = torch.stack([torch.cat(scattered(cohort, given)).double() for _ in range(trials)])
    truth = torch.stack(given).double().mean(0).flatten()
    jump = (runs - truth).abs().max()
    bound = 6 * runs.std(0) / math.sqrt(trials) + 8 * jump / trials + 1e-6 * (1 + truth.abs())
    assert ((runs.mean(0) - truth).abs() <= bound).all()


@every(
    SCATTERS,
    quick=DEFAULTS,
    bad=(torch.nan, torch.inf),
    dtype=(torch.float32, torch.bfloat16, torch.float64),
    dense_below=(0, 100),
)
def test_a_non_finite_number_for_one_rank_aborts_the_step_on_all(
    method: str, bad: float, dtype: torch.dtype, dense_below: int
) -> None:
    """A mean without state has nothing to abort: it is non-finite in that place, and nowhere else."""
    given, cohort = gradients(3, 70, dtype), cohort_of(method, 3, dense_below=dense_below)
    given[2][1, 69] = bad  # of rank 2, for rank 1
    outputs = scattered(cohort, given)
    if parse(method).traits.single_mean:
        places = [out.isfinite().logical_not().nonzero().flatten().tolist() for out in outputs]
        assert places == [[], [69], []]
    else:
        assert all(out.isnan().all() for out in outputs)
        assert [session.meter.skipped_steps for session in cohort.sessions] == [1, 1, 1]
        assert [session.step for session in cohort.sessions] == [0, 0, 0]
    assert all(out.dtype == dtype for out in outputs)


def test_the_majority_decides_the_signs() -> None:
    given = gradients(3, 200)
    for rank, out in enumerate(scattered(cohort_of("signsgd", 3), given)):
        votes = torch.stack([rows[rank].sign() for rows in given]).sum(0)
        assert torch.equal(out.sign(), votes.sign())
