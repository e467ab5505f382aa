"""The histogram of gradient magnitudes: exact counts of all ranks, in bytes no model changes."""

import math

import numpy as np
import pytest
import torch

import thinwire
from thinwire.drivers import Lockstep
from thinwire.errors import ConfigError, DisagreementError, ThinwireError
from thinwire.net.launch import Worker, run_local
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.histogram import Histogram, measure


def learned(ranks: list[list[torch.Tensor]], ratios: list[float | None] | None = None) -> list[Histogram]:
    driver = Lockstep(len(ranks))
    results: list[list[Histogram]] = [[] for _ in ranks]
    ratios = ratios or [0.01] * len(ranks)
    driver.run(
        [
            measure(tensors, ratio, rank_info, result)
            for tensors, ratio, rank_info, result in zip(
                ranks, ratios, driver.rank_infos, results, strict=True
            )
        ]
    )
    assert {meter.payload_bytes for meter in driver.meters} == {4176}
    return [result[0] for result in results]


def test_counts_are_those_of_all_ranks_together():
    rng = torch.Generator().manual_seed(1)
    ranks = [[torch.randn(3000, generator=rng) * 1e-3, torch.randn(7, 11, generator=rng)] for _ in range(3)]
    found = learned(ranks)
    everything = torch.cat([t.reshape(-1) for tensors in ranks for t in tensors]).double().abs().numpy()
    expected, _ = np.histogram(everything, bins=np.array(Histogram.edges()))
    assert found[0] == found[1] == found[2]
    assert list(found[0].counts) == expected.tolist()
    assert found[0].total == len(everything)
    assert found[0].magnitude == pytest.approx(everything.mean())
    signed = torch.cat([t.reshape(-1) for tensors in ranks for t in tensors]).double()
    assert found[0].mean == pytest.approx(float(signed.mean()))
    assert found[0].deviation == pytest.approx(float(signed.std(correction=0)))


def test_the_thresholds_of_a_gaussian_and_a_laplace_are_found_by_their_own_fit():
    rng = torch.Generator().manual_seed(2)
    n, ratio = 400_000, 0.01
    gaussian = torch.randn(n, generator=rng) * 2e-4
    uniform = torch.rand(n, generator=rng).clamp_(1e-7) - 0.5
    laplace = -3e-3 * uniform.sign() * (1 - 2 * uniform.abs()).clamp_min(1e-7).log()
    for data, right, wrong in (
        (gaussian, "gaussian_threshold", "laplace_threshold"),
        (laplace, "laplace_threshold", "gaussian_threshold"),
    ):
        (found,) = learned([[data]], [ratio])
        real = float(data.abs().topk(int(ratio * n)).values.min())
        assert found.real_threshold == pytest.approx(real)
        assert found.threshold(ratio) == pytest.approx(real, rel=0.02)
        assert getattr(found, right)(ratio) == pytest.approx(real, rel=0.02)
        assert getattr(found, wrong)(ratio) != pytest.approx(real, rel=0.1)
        assert found.share_above(found.threshold(ratio)) == pytest.approx(ratio)


def test_zeros_and_numbers_that_are_not_finite_are_counted_apart():
    odd = torch.tensor([0.0, -0.0, 1e-30, 1e30, math.inf, -math.inf, math.nan, 1.0])
    (found,) = learned([[odd.to(torch.float32)]], [None])
    assert (found.small, found.large, found.not_finite, sum(found.counts)) == (3, 1, 3, 1)
    assert found.total == 5
    assert math.isnan(found.real_threshold)


def test_halves_and_ranks_without_gradients():
    halves = torch.tensor([0.5, -2.0]).to(torch.bfloat16)
    found = learned([[halves], []], [None, None])
    assert found[1].total == 2
    assert found[1].magnitude == 1.25


def test_histograms_of_several_steps_add_up():
    rng = torch.Generator().manual_seed(3)
    first, second = torch.randn(500, generator=rng), 5 + torch.randn(1500, generator=rng)
    (a,), (b,), (both,) = learned([[first]]), learned([[second]]), learned([[first, second]])
    together = a.plus(b)
    assert together.counts == both.counts
    assert together.deviation == pytest.approx(both.deviation)
    assert together.magnitude == pytest.approx(both.magnitude)


def test_mistakes():
    with pytest.raises(ConfigError, match="ratio"):
        measure([], 1.5, RankInfo(0, 1), [])
    with pytest.raises(ConfigError, match="no gradient on any rank"):
        learned([[], []], [None, None])
    with pytest.raises(DisagreementError, match="different ratios"):
        learned([[torch.ones(9)], [torch.ones(9)], [torch.ones(9)]], [0.01, 0.02, 0.03])
    session = thinwire.Session([("w", torch.ones(3))], "dense", rank_info=RankInfo(0, 1))
    with pytest.raises(ThinwireError, match="driver"):
        session.histogram()


def _on_rank(worker: Worker) -> list[tuple[Histogram, int]]:
    found = []
    for width in (10, 300):
        model = torch.nn.Linear(width, width)
        session = thinwire.Session(model.named_parameters(), "topk(ratio=0.1)")
        with torch.random.fork_rng():
            torch.manual_seed(worker.rank)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        before = session.meter.payload_bytes
        histogram = session.histogram(ratio=0.1)
        found.append((histogram, session.meter.payload_bytes - before))
        session.detach()
    return found


def test_on_ranks_the_bytes_do_not_depend_on_the_model():
    ranks = run_local(_on_rank, 2)
    assert ranks[0] == ranks[1]
    (small, few), (large, many) = ranks[0]
    assert few == many == 4176
    assert (small.total, large.total) == (2 * 110, 2 * 90_300)
    assert large.gaussian_threshold(0.1) == pytest.approx(large.real_threshold, rel=0.02)
