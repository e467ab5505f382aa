import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.laws.cohort import Cohort
from thinwire import ConfigError, PayloadError, kernels
from thinwire.methods import GSpar
from thinwire.methods.families import sampled
from thinwire.net.costs import Link


def heavy(n: int = 4000, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) ** 3


def probabilities(method: GSpar, g: torch.Tensor) -> torch.Tensor:
    return (g.abs().double() * method.lam(g)).clamp(max=1)


def encoded(method: GSpar, g: torch.Tensor, seed: int) -> torch.Tensor:
    return sampled.encode(g.numel(), method.sample(g, seed))


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


def entropy_bits(n: int, k: int) -> float:
    """log2 of the number of ways to place k entries among n."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


@pytest.mark.parametrize("ratio", [0.001, 0.003, 0.01, 0.03, 0.1, 0.2])
def test_the_code_is_near_the_entropy(ratio: float) -> None:
    """At most 3 % and 16 bytes above positions, a sign per drawn entry and a float per sure one."""
    for g in (torch.randn(200_000, generator=torch.Generator().manual_seed(0)), heavy(200_000)):
        method = GSpar(ratio=ratio)
        sure, values, drawn, _ = method.sample(g, 0)
        positions = entropy_bits(len(g), len(sure)) + entropy_bits(len(g), len(drawn))
        rest = 32 * len(values) + len(drawn)
        bits = 8 * encoded(method, g, 0).numel()
        assert positions + rest <= bits <= 1.03 * positions + rest + 128


def test_clustered_entries_do_not_cost_more() -> None:
    g = torch.zeros(100_000)
    g[:2000] = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    _, _, drawn, _ = GSpar(ratio=0.01).sample(g, 0)
    code = encoded(GSpar(ratio=0.01), g, 0)
    assert 8 * code.numel() < entropy_bits(len(g), len(drawn)) + len(drawn) + 32 * 1000


def test_ratio_one_is_exact() -> None:
    g = heavy()
    assert torch.equal(sent(GSpar(ratio=1), g, 0), g)


@pytest.mark.parametrize("reference", [False, True])
def test_payloads_are_checked(reference: bool) -> None:
    g, method = heavy(500), GSpar(ratio=0.1)
    code = encoded(method, g, 0)
    none = torch.zeros(0, dtype=torch.uint8)
    more = torch.tensor([1], dtype=torch.uint8)
    many = torch.tensor([0xFF] * 4 + [0x0F], dtype=torch.uint8)  # 2^32 - 1
    endless = torch.full((30,), 0xFF, dtype=torch.uint8)
    wrong = [none, code[:1], code[:3], code[:20], code[:-1], torch.cat([code, more]), endless]
    wrong += [torch.cat([many, code[1:]]), torch.cat([code[:1], many, code[2:]])]
    wrong += [torch.cat([code[:2], many, code[3:]])]
    with kernels.use_reference() if reference else nullcontext():
        for broken in wrong:
            with pytest.raises(PayloadError):
                sampled.decode(broken, 500)


@given(st.binary(max_size=120), st.integers(0, 300), st.booleans())
def test_noise_is_refused_or_in_range(noise: bytes, n: int, reference: bool) -> None:
    code = torch.tensor(list(noise), dtype=torch.uint8)
    with kernels.use_reference() if reference else nullcontext():
        try:
            found = sampled.decode(code, n)
        except PayloadError:
            return
    for indices, values in found:
        assert len(indices) == len(values)
        assert not len(indices) or (int(indices[0]) >= 0 and int(indices[-1]) < n)
        assert bool((indices.diff() > 0).all())


# -- the split reduction ---------------------------------------------------------------------------------


def averages(method: str, size: int, gradients: list[torch.Tensor], trials: int) -> torch.Tensor:
    cohort = Cohort(method, size, {"w": (gradients[0].numel(),)})
    return torch.stack(
        [cohort.average([{"w": g} for g in gradients])[0]["w"].double() for _ in range(trials)]
    )


@pytest.mark.parametrize("size", [2, 5])
def test_a_split_reduction_is_unbiased_with_the_variance_of_both_samplings(size: int) -> None:
    """V + epsilon (|mean g|^2 + V): each range meets the budget, and the second sampling sees the first."""
    n, trials, epsilon = 400, 500, 1.0
    gradients = [heavy(n, seed) for seed in range(size)]
    mean = (sum(g.double() for g in gradients) / size).float()
    method = GSpar(budget=epsilon)
    found = averages("gspar(budget=1.0, reduce='split')", size, gradients, trials)
    first = sum(g.double().square() * (1 / probabilities(method, g) - 1) for g in gradients) / size**2
    expected = float(first.sum() + epsilon * (mean.double().square().sum() + first.sum()))
    variance = float(found.var(0).sum())
    assert variance == pytest.approx(expected, rel=0.1)
    sums = (found - mean).view(trials, 20, -1).sum(2)
    z = sums.mean(0) / (sums.var(0) / trials).sqrt()
    assert float(z.abs().max()) < 5


def test_a_split_reduction_sends_about_two_payloads() -> None:
    sent_bytes = {}
    for size in (8, 32):
        cohort = Cohort("gspar(ratio=0.1, reduce='split')", size, {"w": (60_000,)})
        cohort.average(cohort.inputs(0))
        sent_bytes[size] = [meter.sent_bytes for meter in cohort.driver.meters]
    one = encoded(GSpar(ratio=0.1), heavy(60_000), 0).numel()
    assert max(sent_bytes[8]) < 2 * one
    # 24 more pieces each way, with a header, a table, a length and padding.
    assert max(sent_bytes[32]) < 1.2 * max(sent_bytes[8]) + 24 * 2 * 40


def test_auto_splits_from_five_ranks_on() -> None:
    sizes, link = (1, 2, 4, 5, 64, 1024), Link()
    for method in (GSpar(), GSpar(budget=1.0)):
        assert [method.splits(1_000_000, size, link) for size in sizes] == [False] * 3 + [True] * 3
        assert not method.splits(1000, 64, link)
    assert not GSpar(reduce="split").splits(1_000_000, 1, link)
    assert not GSpar(reduce="gather").splits(1_000_000, 1024, link)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_split_reduction_tells_every_rank_of_a_bad_entry(bad: float) -> None:
    cohort = Cohort("gspar(ratio=0.05, reduce='split')", 3, {"w": (300,)})
    inputs = cohort.inputs(0)
    inputs[1]["w"][250] = bad
    for out in cohort.average(inputs):
        assert not bool(out["w"].isfinite().all())


def test_the_model_scope_spends_where_the_gradient_is() -> None:
    cohort = Cohort("gspar(ratio=0.1, scope='model')", 2, {"large": (40, 40), "small": (40, 40)})
    inputs = cohort.inputs(0)
    for one in inputs:
        one["small"] *= 1e-3
    out = cohort.average(inputs)[0]
    assert int((out["small"] != 0).sum()) < int((out["large"] != 0).sum()) / 10


@pytest.mark.parametrize(
    "options", [{"ratio": 0}, {"rounds": -1}, {"budget": 0.0}, {"scope": "layer"}, {"reduce": "sum"}]
)
def test_wrong_options(options) -> None:
    with pytest.raises(ConfigError):
        GSpar(**options)
