import math

import pytest
import torch

from tests.laws.cohort import Cohort
from thinwire import ConfigError, PayloadError, kernels
from thinwire.methods import GSpar
from thinwire.methods.families import sampled


def heavy(n: int = 4000, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) ** 3


def probabilities(method: GSpar, g: torch.Tensor) -> torch.Tensor:
    return (g.abs().double() * method.lam(g)).clamp(max=1)


def encoded(method: GSpar, g: torch.Tensor, seed: int) -> list[torch.Tensor]:
    return sampled.encode(g.numel(), *kernels.gspar_sample(g, method.lam(g), seed))


def sent(method: GSpar, g: torch.Tensor, seed: int) -> torch.Tensor:
    q = torch.zeros_like(g)
    for indices, values in sampled.decode(encoded(method, g, seed), g.numel()):
        q[indices.long()] += values
    return q


def second_moment(p: torch.Tensor, g: torch.Tensor) -> float:
    g = g.double()
    return float((g.square() / p)[g != 0].sum() / g.square().sum())


def test_unbiasedness() -> None:
    g, trials, method = heavy(), 400, GSpar(ratio=0.1)
    p = probabilities(method, g)
    mean = sum(sent(method, g, seed).double() for seed in range(trials)) / trials
    variance = g.double().square() * (1 / p - 1)
    z = (mean - g).sum() / (variance.sum() / trials).sqrt()
    assert abs(float(z)) < 5
    jump = 1 / method.lam(g)
    assert ((mean - g).abs() < 6 * (variance / trials).sqrt() + 8 * jump / trials + 1e-6).all()


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 4.0])
def test_the_variance_meets_the_budget(epsilon: float) -> None:
    g = heavy()
    assert second_moment(probabilities(GSpar(budget=epsilon), g), g) == pytest.approx(1 + epsilon, rel=1e-4)


@pytest.mark.parametrize(("ratio", "rounds"), [(0.01, 2), (0.05, 2), (0.2, 6)])
def test_the_probabilities_sum_to_the_ratio(ratio: float, rounds: int) -> None:
    p = probabilities(GSpar(ratio=ratio, rounds=rounds), heavy(20_000))
    assert float(p.mean()) == pytest.approx(ratio, rel=0.02)
    assert float(p.mean()) <= ratio * 1.0001


def test_as_many_are_sent_as_the_probabilities_say() -> None:
    g, method = heavy(20_000), GSpar(ratio=0.05)
    p = probabilities(method, g)
    counts = [int((sent(method, g, seed) != 0).sum()) for seed in range(20)]
    expected, deviation = float(p.sum()), math.sqrt(float((p * (1 - p)).sum()) / 20)
    assert abs(sum(counts) / 20 - expected) < 5 * deviation


def test_larger_entries_are_likelier() -> None:
    g = heavy()
    for method in (GSpar(ratio=0.05), GSpar(budget=1.0)):
        p = probabilities(method, g)[g.abs().argsort()]
        assert (p.diff() >= 0).all()


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.3])
def test_beats_other_probabilities_of_the_same_sum(ratio: float) -> None:
    g = heavy()
    p = probabilities(GSpar(ratio=ratio, rounds=20), g)
    ours = second_moment(p, g)
    uniform = torch.full_like(p, float(p.mean()))
    assert ours < second_moment(uniform, g)
    # Optimality: moving a little probability between two entries does not help.
    free = torch.nonzero(p < 0.9).flatten()
    some, others = free[: len(free) // 2], free[-(len(free) // 2) :]
    for sign in (1, -1):
        moved = p.clone()
        step = 0.05 * torch.minimum(p[some], p[others])
        moved[some] += sign * step
        moved[others] -= sign * step
        assert ours <= second_moment(moved, g) * (1 + 1e-9)


def test_encoding_and_decoding_give_back_what_was_drawn() -> None:
    g, method = heavy(), GSpar(ratio=0.1)
    q, p = sent(method, g, 5), probabilities(method, g)
    certain = p >= 1
    assert torch.equal(q[certain], g[certain])
    sampled = (q != 0) & ~certain
    assert torch.allclose(q[sampled].abs(), torch.tensor(1 / method.lam(g), dtype=torch.float32))
    assert torch.equal(q[sampled].sign(), g[sampled].sign())


def test_sampled_entries_cost_an_index_and_a_bit() -> None:
    g = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    parts = encoded(GSpar(ratio=0.01), g, 0)
    size = sum(part.numel() * part.element_size() for part in parts)
    assert size < 1000 * (9 + 1) / 8 * 1.15  # 8.6 bits an index, one of sign; hardly any has p = 1


def test_ratio_one_is_exact() -> None:
    g = heavy()
    assert torch.equal(sent(GSpar(ratio=1), g, 0), g)


def test_payloads_are_checked() -> None:
    g, method = heavy(500), GSpar(ratio=0.1)
    parts = encoded(method, g, 0)
    wrong = [
        [parts[0], parts[1][:0], *parts[2:]],
        [parts[0], torch.cat([parts[1], parts[1]]), *parts[2:]],
        [*parts[:2], torch.tensor([-1], dtype=torch.int32), *parts[3:]],
        [*parts[:2], torch.tensor([501], dtype=torch.int32), *parts[3:]],
        [*parts[:2], torch.tensor([], dtype=torch.int32), *parts[3:]],
        [*parts[:2], parts[2] + 9, *parts[3:]],
        [*parts[:3], parts[3][:-1], parts[4]],
        [*parts[:4], parts[4][:-1]],
    ]
    for broken in wrong:
        with pytest.raises(PayloadError):
            sampled.decode(broken, 500)


def test_the_model_scope_spends_where_the_gradient_is() -> None:
    cohort = Cohort("gspar(ratio=0.1, scope='model')", 2, {"large": (40, 40), "small": (40, 40)})
    inputs = cohort.inputs(0)
    for one in inputs:
        one["small"] *= 1e-3
    out = cohort.average(inputs)[0]
    assert int((out["small"] != 0).sum()) < int((out["large"] != 0).sum()) / 10


@pytest.mark.parametrize("options", [{"ratio": 0}, {"rounds": -1}, {"budget": 0.0}, {"scope": "layer"}])
def test_wrong_options(options) -> None:
    with pytest.raises(ConfigError):
        GSpar(**options)
