import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, FINITE_KINDS, quick, reference, same, vector, vectors

from thinwire import kernels

KINDS = tuple(kind for kind in FINITE_KINDS if kind != "denormal")
RATIOS = st.sampled_from([0.001, 0.01, 0.05, 0.2, 1.0])


@quick
@given(vectors(), RATIOS, st.integers(0, 3))
def test_greedy_equals_the_reference(x, ratio, rounds):
    lam = kernels.gspar_probabilities(x, ratio, rounds)
    expected = reference(lambda: kernels.gspar_probabilities(x, ratio, rounds))
    assert lam == pytest.approx(expected, rel=1e-6)


@quick
@given(st.integers(0, 20), st.sampled_from([0.001, 0.01, 0.05]))
def test_two_rounds_meet_the_density(seed, ratio):
    x = vector("heavy", 100_003, seed).clamp(-100, 100)
    lam = kernels.gspar_probabilities(x, ratio)
    p = (x.abs().double() * lam).clamp(max=1)
    assert 0.95 * ratio <= float(p.mean()) <= 1.001 * ratio


@quick
@given(vectors(KINDS), st.sampled_from([0.1, 0.5, 1.0, 4.0]))
def test_budget_equals_the_closed_form_and_meets_it(x, epsilon):
    lam = kernels.gspar_budget(x, epsilon)
    assert lam == pytest.approx(reference(lambda: kernels.gspar_budget(x, epsilon)), rel=1e-5)
    g = x.abs().double()
    g = g[g > 0]
    if lam > 0 and g.numel():
        variance = float((g * g / (g * lam).clamp(max=1)).sum())
        assert variance <= (1 + epsilon) * float((g * g).sum()) * (1 + 1e-5)


@quick
@given(vectors(), RATIOS, st.integers(0, 99), st.sampled_from(DTYPES))
def test_sample_equals_the_reference(x, ratio, seed, dtype):
    x = x.to(dtype)
    lam = reference(lambda: kernels.gspar_probabilities(x, ratio))
    got = kernels.gspar_sample(x, lam, seed)
    same(got, reference(lambda: kernels.gspar_sample(x, lam, seed)))
    certain, values, sampled, magnitude = got
    same(values, x[certain.long()].float())
    index = (sampled & 0x7FFFFFFF).long()
    assert bool((index[1:] > index[:-1]).all())
    assert bool(((sampled < 0) == (x[index] < 0)).all())
    assert magnitude == (1 / lam if lam else 0.0)


def test_unbiased():
    x = vector("heavy", 2000, 1).clamp(-50, 50)
    lam = kernels.gspar_probabilities(x, 0.1)
    total, draws = torch.zeros(2000), 500
    for seed in range(draws):
        certain, values, sampled, magnitude = kernels.gspar_sample(x, lam, seed)
        total[certain.long()] += values
        total[(sampled & 0x7FFFFFFF).long()] += torch.where(sampled < 0, -magnitude, magnitude)
    p = (x.abs() * lam).clamp(max=1)
    expected = draws * p
    busy = (p < 1) & (expected > 25)
    z = (total / draws - x) / (x.abs() * ((1 - p) / p).sqrt() / draws**0.5)
    assert float(z[busy].abs().max()) < 5.5
    assert abs(float(z[p < 1].mean())) < 5 / float((p < 1).sum()) ** 0.5
    assert torch.allclose(total[p >= 1] / draws, x[p >= 1])


def test_edges():
    assert kernels.gspar_probabilities(torch.zeros(100), 0.1) == 0.0
    assert kernels.gspar_budget(torch.zeros(100), 0.1) == 0.0
    certain, _, sampled, magnitude = kernels.gspar_sample(torch.tensor([0.0, torch.nan, torch.inf]), 0.0, 1)
    assert certain.tolist() == [1, 2]
    assert sampled.numel() == 0
    assert magnitude == 0.0
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="lambda"):
            kernels.gspar_sample(torch.ones(3), bad, 0)
