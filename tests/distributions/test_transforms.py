"""Transforms, projections and fits: each against a slow or explicit version of itself."""

import itertools

import numpy as np
import pytest

from thinwire.distributions.haar import haar, haar_terms, inverse_haar
from thinwire.distributions.hadamard import fwht, power_of_two
from thinwire.distributions.monotone import birge_edges, isotonic
from thinwire.distributions.partition import Partition
from thinwire.distributions.pieces import fit_pieces
from thinwire.distributions.simplex import onto_simplex


def test_the_walsh_hadamard_transform_is_the_matrix_and_undoes_itself():
    size = 32
    matrix = np.array([[(-1) ** (r & c).bit_count() for c in range(size)] for r in range(size)])
    x = np.random.default_rng(0).normal(size=(3, size))
    np.testing.assert_allclose(fwht(x), x @ matrix, atol=1e-12)
    np.testing.assert_allclose(fwht(fwht(x)) / size, x, atol=1e-12)
    with pytest.raises(ValueError, match="power of two"):
        fwht(np.zeros(12))


def test_powers_of_two():
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


def test_the_haar_transform_is_orthonormal_and_inverts():
    rng = np.random.default_rng(1)
    x = rng.normal(size=256)
    np.testing.assert_allclose(inverse_haar(haar(x)), x, atol=1e-12)
    assert np.isclose((haar(x) ** 2).sum(), (x**2).sum())
    matrix = np.array([haar(row) for row in np.eye(16)])
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(16), atol=1e-12)


@pytest.mark.parametrize("pieces", [1, 2, 5, 17])
def test_a_histogram_has_few_haar_coefficients(pieces: int):
    rng = np.random.default_rng(pieces)
    for _ in range(20):
        cuts = np.sort(rng.choice(np.arange(1, 1024), pieces - 1, replace=False))
        lengths = np.diff(np.concatenate(([0], cuts, [1024])))
        x = np.repeat(rng.normal(size=pieces), lengths)
        assert np.count_nonzero(np.abs(haar(x)) > 1e-9) <= haar_terms(1024, pieces)


def test_the_simplex_projection_is_the_nearest_distribution():
    rng = np.random.default_rng(2)
    for _ in range(20):
        values = rng.normal(0.1, 0.3, size=9)
        p = onto_simplex(values)
        assert np.isclose(p.sum(), 1.0)
        assert p.min() >= 0
        others = rng.dirichlet(np.ones(9), size=200)
        assert ((others - values) ** 2).sum(1).min() >= ((p - values) ** 2).sum()
    q = rng.dirichlet(np.ones(9))
    np.testing.assert_allclose(onto_simplex(q), q)


def test_birges_cells_cover_the_domain_and_grow():
    edges = birge_edges(10_000, 0.1)
    lengths = np.diff(edges)
    assert edges[0] == 0
    assert edges[-1] == 10_000
    assert (np.diff(lengths[:-1]) >= 0).all()
    assert len(lengths) < 100


@pytest.mark.parametrize("increasing", [False, True])
def test_isotonic_is_monotone_keeps_the_mass_and_leaves_monotone_input_alone(increasing: bool):
    rng = np.random.default_rng(3)
    partition = Partition(np.array([0, 1, 2, 4, 7, 12, 20]))
    lengths = partition.lengths
    masses = rng.random(6)
    density = isotonic(masses, partition, increasing=increasing)
    steps = np.diff(density)
    assert (steps >= 0).all() if increasing else (steps <= 0).all()
    assert np.isclose((density * lengths).sum(), masses.sum())
    again = isotonic(density * lengths, partition, increasing=increasing)
    np.testing.assert_allclose(again, density)


def _all_cuts_cost(masses: np.ndarray, lengths: np.ndarray, pieces: int) -> float:
    """The least squared l2 cost of any cut into so many runs, by trying all of them."""
    size, best = len(masses), np.inf
    for cuts in itertools.combinations(range(1, size), pieces - 1):
        cost = 0.0
        for low, high in itertools.pairwise((0, *cuts, size)):
            m, n = masses[low:high], lengths[low:high]
            cost += (n * (m / n - m.sum() / n.sum()) ** 2).sum()
        best = min(best, cost)
    return best


def test_dynamic_programming_finds_the_cheapest_cut_of_all():
    rng = np.random.default_rng(4)
    for pieces in (1, 2, 3, 4):
        lengths = rng.integers(1, 5, size=11)
        masses = rng.random(11)
        segments = Partition(np.concatenate(([0], np.cumsum(lengths))))
        fit = fit_pieces(segments, masses, pieces, "l2", 1000, exact=True)
        assert len(fit.masses) <= pieces
        assert np.isclose(fit.cost, _all_cuts_cost(masses, lengths, pieces))
        assert np.isclose(fit.values().sum(), masses.sum())


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_greedy_merging_finds_clear_pieces_in_a_large_domain(norm: str):
    rng = np.random.default_rng(5)
    cuts = np.array([0, 1000, 5000, 5500, 20_000])
    p = np.repeat([0.1 / 1000, 0.5 / 4000, 0.3 / 500, 0.1 / 14_500], np.diff(cuts))
    n = 2_000_000
    frequencies = rng.multinomial(n, p) / n
    fit = fit_pieces(Partition.of_symbols(20_000), frequencies, 4, norm, n, exact=norm == "l2")
    assert np.abs(fit.values() - p).sum() < np.abs(frequencies - p).sum() / 6
