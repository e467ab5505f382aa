import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import FINITE_KINDS, SIZES, quick, reference, same, vector, vectors

from thinwire import kernels
from thinwire.kernels.reference.sketch import MEDIAN_NETWORKS

ROWS = st.sampled_from([1, 3, 5, 7])
COLS = st.sampled_from([1, 5, 63, 64, 100, 2000])
KINDS = tuple(kind for kind in FINITE_KINDS if kind != "huge")


@pytest.mark.parametrize("rows", MEDIAN_NETWORKS)
def test_networks_find_the_median(rows):
    for bits in itertools.product((0, 1), repeat=rows):  # the 0-1 principle
        v = list(bits)
        for i, j in MEDIAN_NETWORKS[rows]:
            v[i], v[j] = min(v[i], v[j]), max(v[i], v[j])
        assert v[rows // 2] == sorted(bits)[rows // 2]


@quick
@given(vectors(KINDS), ROWS, COLS, st.integers(0, 2**64 - 1))
def test_insert_equals_the_reference(x, rows, cols, seed):
    table, expected = torch.ones(rows, cols), torch.ones(rows, cols)
    kernels.sketch_insert(x, rows, cols, seed, table)
    reference(lambda: kernels.sketch_insert(x, rows, cols, seed, expected))
    # The order of the additions differs where runs wrap around.
    bound = 1e-6 * float(x.abs().sum()) + 1e-5
    torch.testing.assert_close(table, expected, rtol=1e-4, atol=bound)


@quick
@given(st.sampled_from(SIZES), ROWS, COLS, st.integers(0, 99), st.sampled_from(["normal", "ties", "nan"]))
def test_query_equals_the_reference(n, rows, cols, seed, kind):
    table = vector(kind, rows * cols, seed).view(rows, cols)
    out, expected = torch.empty(n), torch.empty(n)
    kernels.sketch_query(table, n, seed, out)
    reference(lambda: kernels.sketch_query(table, n, seed, expected))
    same(out, expected)
    for k in (0, 1, n // 50, n):
        same(kernels.sketch_query_topk(table, n, seed, k), kernels.topk(out, k)[0])


@pytest.mark.parametrize("kind", ["normal", "constant"])
def test_the_largest_estimates_of_a_small_table(kind):
    """With a constant table all magnitudes are equal: a sample lets everything through."""
    table = vector(kind, 5 * 100, 4).view(5, 100)
    found = kernels.sketch_query_topk(table, 1100, 6, 20)
    same(found, reference(lambda: kernels.sketch_query_topk(table, 1100, 6, 20)))


def test_sketches_add():
    n, rows, cols = 100_003, 5, 2000
    a, b = vector("ties", n, 1), vector("ties", n, 2)  # halves: sums are exact
    together, apart = torch.zeros(rows, cols), torch.zeros(rows, cols)
    kernels.sketch_insert(a + b, rows, cols, 3, together)
    kernels.sketch_insert(a, rows, cols, 3, apart)
    kernels.sketch_insert(b, rows, cols, 3, apart)
    same(together, apart)


@pytest.mark.parametrize(("cols", "at_k", "at_4k"), [(2000, 0.5, 0.95), (10_000, 0.95, 0.99)])
def test_recall_of_planted_hitters(cols, at_k, at_4k):
    n, hitters = 200_000, 200
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, generator=g)
    where = torch.randperm(n, generator=g)[:hitters]
    x[where] = 30.0 * torch.sign(torch.randn(hitters, generator=g))
    table = torch.zeros(5, cols)
    kernels.sketch_insert(x, 5, cols, 42, table)
    planted = set(where.tolist())
    for k, floor in ((hitters, at_k), (4 * hitters, at_4k)):
        found = planted & set(kernels.sketch_query_topk(table, n, 42, k).tolist())
        assert len(found) / hitters >= floor


def test_wide_table_reads_back_exactly():
    x = vector("normal", 64, 0)
    table = torch.zeros(3, 1000)
    kernels.sketch_insert(x, 3, 1000, 1, table)
    out = torch.empty(64)
    kernels.sketch_query(table, 64, 1, out)
    same(out, x)


def test_wrong_tables_are_refused():
    x = torch.ones(10)
    for rows, cols, table in (
        (2, 10, torch.zeros(2, 10)),
        (3, 0, torch.zeros(3, 0)),
        (3, 9, torch.zeros(3, 10)),
        (3, 10, torch.zeros(10, 3).T),
        (3, 10, torch.zeros(3, 10).double()),
    ):
        with pytest.raises(ValueError, match="table"):
            kernels.sketch_insert(x, rows, cols, 0, table)
    with pytest.raises(ValueError, match="numel"):
        kernels.sketch_query_topk(torch.zeros(3, 10), -1, 0, 1)
