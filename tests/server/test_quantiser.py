"""The grid: unbiased, within its variance, as precise as the rule asks; nothing bad is decoded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import PayloadError
from thinwire.server import quantiser
from thinwire.server.quantiser import NOTHING, RAW, SPARSE, Coded

DRAWS = 3000


def decoded(coded: Coded, size: int, centre: np.ndarray | None = None) -> np.ndarray:
    out = np.full(size, np.nan)
    quantiser.decode(coded, out, centre)
    return out


def draws(code, size: int, centre: np.ndarray | None = None) -> np.ndarray:
    return np.stack([decoded(code(seed), size, centre) for seed in range(DRAWS)])


def assert_unbiased(found: np.ndarray, expected: np.ndarray) -> None:
    """Within five standard errors in every coordinate."""
    error = found.std(0) / np.sqrt(len(found))
    assert (np.abs(found.mean(0) - expected) <= 5 * error + 1e-6 * np.abs(expected).max()).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_differences_are_unbiased_and_within_their_variance(bits):
    alpha = np.random.default_rng(bits).normal(size=30)
    found = draws(lambda seed: quantiser.difference(alpha, bits, seed), 30)
    assert_unbiased(found, alpha)
    step = np.abs(alpha).max() / (2 ** (bits - 1) - 1)
    loss = ((found - alpha) ** 2).sum(1).mean()
    assert 0.2 * 30 * step**2 / 4 < loss <= 1.02 * 30 * step**2 / 4


def test_survivors_are_unbiased_and_as_many_as_the_budget_says():
    alpha = np.random.default_rng(1).normal(size=50)
    codes = [quantiser.survivors(alpha, 0.5, seed) for seed in range(DRAWS)]
    found = np.stack([decoded(code, 50) for code in codes])
    assert_unbiased(found, alpha)
    budget = 0.5 * np.abs(alpha).sum() / np.abs(alpha).max()
    assert np.mean([code.entries for code in codes]) == pytest.approx(budget, rel=0.03)
    magnitudes = np.unique(np.abs(found[found != 0]))
    assert np.ptp(magnitudes) < 1e-6 * magnitudes[0]


@pytest.mark.parametrize("mode", ["paper", "centered"])
@pytest.mark.parametrize("mu", [0.1, 0.5])
def test_the_precision_rule_holds_on_random_pairs(mode, mu):
    rng = np.random.default_rng(2)
    for distance in (1.0, 1e-3, 1e-6):
        snapshot = rng.normal(size=60)
        x = snapshot + distance * rng.normal(size=60) * rng.exponential(size=60)
        square = ((x - snapshot) ** 2).sum()
        centre = snapshot if mode == "centered" else None
        losses, bits = [], set()
        for seed in range(400):
            coded, told = quantiser.parameters(x, snapshot, mode=mode, bits=None, mu=mu, seed=seed)
            losses.append(((decoded(coded, 60, centre) - x) ** 2).sum())
            bits.add(coded.form)
            assert told == pytest.approx(square)
        assert 0.2 * mu * square < np.mean(losses) <= mu * square
        assert len(bits) == 1
    assert (bits.pop() > 20) == (mode == "paper")  # centering needs no more bits as x nears the snapshot


@given(st.integers(1, 48), st.integers(1, 40), st.integers(0, 2**32))
def test_every_width_survives_the_packing(bits, size, seed):
    rng = np.random.default_rng(seed)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    values = rng.integers(low, high, size, endpoint=True).astype(np.float64)
    packed = np.zeros(-(-bits * size // 8), np.uint8)
    quantiser.grid.encode(values * 0.5, values[:0], 0.5, bits, np.uint32(seed), np.uint32(7), packed)
    assert np.array_equal(decoded(Coded(bits, size, 0.5, packed), size), values * 0.5)


def test_values_beyond_the_grid_are_clipped():
    packed = np.zeros(2, np.uint8)
    far = np.array([-100.0, 100.0])
    quantiser.grid.encode(far, far[:0], 1.0, 4, np.uint32(0), np.uint32(0), packed)
    assert decoded(Coded(4, 2, 1.0, packed[:1]), 2).tolist() == [-8.0, 7.0]


def test_zero_is_a_token():
    zero, x = np.zeros(5), np.arange(5.0)
    for coded in (quantiser.difference(zero, 4, 0), quantiser.survivors(zero, 1.0, 0)):
        assert coded.form == NOTHING
        assert len(coded.payload) == 0
        assert np.array_equal(decoded(coded, 5), zero)
    for mode in ("paper", "centered"):
        same, _ = quantiser.parameters(x, x.copy(), mode=mode, bits=None, mu=0.5, seed=0)
        assert same.form == NOTHING
        assert np.array_equal(decoded(same, 5, x), x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_float32_is_sent_as_it_is(dtype):
    x = np.random.default_rng(0).normal(size=7).astype(dtype)
    assert np.array_equal(decoded(quantiser.difference(x, 32, 0), 7), x.astype(np.float32))


@pytest.mark.parametrize(
    "coded",
    [
        Coded(4, 10, 1.0, np.zeros(4, np.uint8)),
        Coded(4, 9, 1.0, np.zeros(5, np.uint8)),
        Coded(49, 10, 1.0, np.zeros(62, np.uint8)),
        Coded(4, 10, float("nan"), np.zeros(5, np.uint8)),
        Coded(4, 10, -1.0, np.zeros(5, np.uint8)),
        Coded(RAW, 10, 0.0, np.full(40, 255, np.uint8)),
        Coded(RAW, 10, 0.0, np.zeros(39, np.uint8)),
        Coded(SPARSE, 11, 1.0, np.zeros(99, np.uint8)),
        Coded(SPARSE, 3, 1.0, np.zeros(3, np.uint8)),
        Coded(SPARSE, 3, 1.0, np.zeros(0, np.uint8)),
    ],
)
def test_a_vector_that_does_not_fit_is_refused(coded):
    with pytest.raises(PayloadError):
        decoded(coded, 10)


@given(st.integers(0, 10), st.binary(min_size=0, max_size=40))
def test_no_bytes_reach_beyond_a_sparse_vector(entries, noise):
    length = quantiser.payload_bytes(SPARSE, entries, 10)
    payload = np.frombuffer((noise + bytes(40))[:length], np.uint8)
    out = np.zeros(10)
    try:
        quantiser.decode(Coded(SPARSE, entries, 2.0, payload), out)
    except PayloadError:
        return
    assert (out != 0).sum() == entries
