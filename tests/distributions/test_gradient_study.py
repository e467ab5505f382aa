"""The gradient study: fits recover what was drawn, and the loss of top-k is that of its definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.drivers import Lockstep
from thinwire.errors import ConfigError
from thinwire.sessions.histogram import Histogram, measure
from thinwire.tools.gradients import data_of, fit_all, lost_by_topk
from thinwire.tools.gradients.fits import FAMILIES
from thinwire.tools.workloads import MODELS

N = 200_000


def histogram(data: torch.Tensor) -> Histogram:
    driver, result = Lockstep(1), []
    driver.run([measure([data], None, driver.rank_infos[0], result)])
    return result[0]


def drawn(family: str, shape: float, scale: float) -> torch.Tensor:
    rng = np.random.default_rng(4)
    signs = rng.choice((-1.0, 1.0), N)
    made = {
        "Gaussian": lambda: rng.standard_normal(N),
        "Laplace": lambda: rng.laplace(size=N),
        "generalised Gaussian": lambda: signs * rng.gamma(1 / shape, size=N) ** (1 / shape),
        "Student t": lambda: rng.standard_t(shape, N),
    }
    return torch.tensor(scale * made[family](), dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("Gaussian", math.nan),
        ("Laplace", math.nan),
        ("generalised Gaussian", 0.6),
        ("Student t", 1.5),
        ("Student t", 4.0),
    ],
)
@pytest.mark.parametrize("scale", [3e-5, 20.0])
def test_a_fit_finds_the_distribution_that_was_drawn(family: str, shape: float, scale: float) -> None:
    found = {fit.family: fit for fit in fit_all(histogram(drawn(family, shape, scale)))}
    own = found[family]
    assert own.scale == pytest.approx(scale, rel=0.03)
    if not math.isnan(shape):
        assert own.shape == pytest.approx(shape, rel=0.03)
    assert own.distance < 0.005
    assert own.log_likelihood >= max(fit.log_likelihood for fit in found.values()) - 1e-4
    for other in found.values():  # families that hold the drawn one as a special case fit as well
        if other.family in ("Gaussian", "Laplace") and other is not own:
            assert other.distance > 0.03


@pytest.mark.parametrize("family", FAMILIES)
def test_densities_and_likelihoods_are_those_of_scipy(family: str) -> None:
    stats = pytest.importorskip("scipy.stats")
    data = drawn("Student t", 3.0, 0.01)
    fit = next(fit for fit in fit_all(histogram(data)) if fit.family == family)
    makers = {
        "Gaussian": lambda: stats.norm(scale=fit.scale),
        "Laplace": lambda: stats.laplace(scale=fit.scale),
        "generalised Gaussian": lambda: stats.gennorm(fit.shape, scale=fit.scale),
        "Student t": lambda: stats.t(fit.shape, scale=fit.scale),
    }
    expected = makers[family]()
    x = np.array([1e-4, 0.01, 0.1])
    assert fit.density(x) == pytest.approx(2 * expected.pdf(x))
    magnitudes = data.double().abs().numpy()
    logs = math.log(2) + expected.logpdf(magnitudes)
    assert fit.log_likelihood == pytest.approx(float(logs.mean()), abs=0.01)
    distance = stats.kstest(magnitudes, lambda x: 2 * expected.cdf(x) - 1).statistic
    assert fit.distance == pytest.approx(distance, abs=0.003)


def test_zeros_are_left_out_of_fits() -> None:
    data = drawn("Laplace", math.nan, 0.1)
    alone, among_zeros = fit_all(histogram(data)), fit_all(histogram(torch.cat([data, torch.zeros(N)])))
    assert alone == among_zeros
    assert fit_all(histogram(torch.zeros(10))) == ()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=200), st.integers(0, 300))
def test_the_loss_is_that_of_an_exact_selection(values: list[float], place: int) -> None:
    u = torch.tensor(values)
    found = lost_by_topk(u, 0.1)
    squares = u.double().square()
    place %= len(found.kept)
    k = round(found.kept[place] * len(values))
    if float(squares.sum()) > 0:
        expected = 1 - float(squares.topk(k).values.sum() / squares.sum())
        assert found.lost[place] == pytest.approx(expected, abs=1e-9)
    assert all(lost <= bound + 1e-9 for lost, bound in zip(found.lost, found.classic, strict=True))
    assert list(found.kept) == sorted(found.kept)


def test_the_tighter_bound_is_for_bell_shapes_alone() -> None:
    for family in ("Gaussian", "Laplace"):
        bell = lost_by_topk(drawn(family, math.nan, 1.0), 0.001)
        assert bell.worst < 1
        kept, lost = bell.near(0.001)
        assert kept == 0.001
        assert lost < (1 - kept) ** 2
    flat = lost_by_topk(torch.ones(1000), 0.1)
    assert flat.worst > 100
    assert flat.near(0.1)[1] == pytest.approx(0.9)


def test_every_model_gets_data_of_its_kind() -> None:
    assert set(data_of("all", ())) == set(MODELS)
    assert data_of("mlp,lstm", ("digits",)) == {"mlp": "digits", "lstm": "synthetic"}
    with pytest.raises(ConfigError, match="mlp learns images"):
        data_of("mlp,cnn", ("synthetic",))
    with pytest.raises(ConfigError, match="both images"):
        data_of("mlp", ("digits", "digits"))
