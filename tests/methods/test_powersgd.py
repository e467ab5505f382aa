"""PowerSGD: linearity, exactness for low rank, dense steps first, one factor by turns."""

import pytest
import torch

from tests.laws.cohort import Cohort, total
from thinwire.methods import PowerSGD

SHAPES = {"wide": (24, 37)}


def low_rank(seed: int, rank: int = 2) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(24, rank, generator=rng) @ torch.randn(rank, 37, generator=rng)


@pytest.mark.parametrize("alternate", [False, True])
def test_it_is_exact_if_the_mean_has_no_higher_rank(alternate: bool) -> None:
    """In the first step with both factors; with one, from the second, when the other spans the space."""
    cohort = Cohort(PowerSGD(rank=2, alternate=alternate, feedback=False), 3, SHAPES)
    mean = low_rank(1)
    noise = cohort.inputs(0)
    middle = sum(one["wide"] for one in noise) / 3
    inputs = [{"wide": mean + one["wide"] - middle} for one in noise]
    for step in range(4):
        exact = torch.allclose(cohort.average(inputs)[0]["wide"], mean, atol=1e-3)
        assert exact == (not alternate or step > 0)


def test_the_alternating_step_is_linear_in_the_matrix_for_a_fixed_factor() -> None:
    """out = M Q Q^T with Q from the shared seed, so the outputs of a sum are the sum of the outputs."""
    method = PowerSGD(rank=2, alternate=True, feedback=False)
    a, b = (Cohort(method, 2, SHAPES).inputs(seed) for seed in (1, 2))
    both = [{"wide": x["wide"] + 3 * y["wide"]} for x, y in zip(a, b, strict=True)]
    of = [Cohort(method, 2, SHAPES).average(inputs)[0]["wide"] for inputs in (a, b, both)]
    assert torch.allclose(of[2], of[0] + 3 * of[1], atol=1e-3)


def test_the_first_factor_is_linear_in_the_matrices_for_a_fixed_q() -> None:
    """So the result depends on the mean alone: one rank with the mean gets what three ranks get."""
    three, one = Cohort(PowerSGD(rank=2), 3, SHAPES), Cohort(PowerSGD(rank=2), 1, SHAPES)
    for step in range(4):
        inputs = three.inputs(step)
        mean = {name: (sums / 3).float() for name, sums in total(inputs).items()}
        output, expected = three.average(inputs)[0]["wide"], one.average([mean])[0]["wide"]
        assert torch.allclose(output, expected, atol=1e-3)


def test_dense_steps_come_first() -> None:
    cohort = Cohort(PowerSGD(rank=1, start_after=2), 3, SHAPES)
    for step in range(4):
        inputs = cohort.inputs(step)
        mean = (total(inputs)["wide"] / 3).float()
        before = cohort.driver.meters[0].payload_bytes
        output = cohort.average(inputs)[0]["wide"]
        payload = cohort.driver.meters[0].payload_bytes - before
        assert torch.allclose(output, mean, atol=1e-5) == (step < 2)
        assert payload == (4 * 24 * 37 if step < 2 else 4 * (24 + 37))


def test_one_round_and_one_factor_a_step() -> None:
    cohort = Cohort(PowerSGD(rank=2, alternate=True), 3, SHAPES)
    payloads = []
    for step in range(4):
        before = cohort.driver.meters[0].total
        cohort.average(cohort.inputs(step))
        spent = cohort.driver.meters[0].total.minus(before)
        assert spent.operations == 1
        payloads.append(spent.payload_bytes)
    assert payloads == [2 * 37 * 4, 2 * 24 * 4] * 2


@pytest.mark.parametrize("alternate", [False, True])
def test_repeated_steps_find_the_best_approximation(alternate: bool) -> None:
    """Power iteration: on the same gradient, without feedback, the error falls to the optimal one."""
    cohort = Cohort(PowerSGD(rank=2, feedback=False, alternate=alternate), 2, SHAPES)
    inputs = cohort.inputs(3)
    mean = (total(inputs)["wide"] / 2).float()
    best = torch.linalg.svdvals(mean)[2:].norm()
    for _ in range(60):
        output = cohort.average(inputs)[0]["wide"]
    assert (output - mean).norm() < 1.02 * best
