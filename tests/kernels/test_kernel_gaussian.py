import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import choices, counts_for, quick, reference, same, vector, vectors

from thinwire import kernels

KINDS = ("normal", "heavy", "shifted")


@quick
@given(vectors(), choices)
def test_gaussiank_equals_the_reference(x, choice):
    k = counts_for(x.numel(), choice)
    indices, values = kernels.gaussiank(x, k)
    same((indices, values), reference(lambda: kernels.gaussiank(x, k)))
    if k >= 1 and x.numel():
        assert 1 <= indices.numel() <= max(4 * k / 3, 1)
    same(values, x[indices.long()])


@quick
@given(st.integers(0, 20), st.sampled_from([0.001, 0.01, 0.1]), st.sampled_from(KINDS))
def test_about_k_on_well_behaved_input(seed, ratio, kind):
    x = vector(kind, 100_003, seed)
    k = int(ratio * x.numel())
    n = kernels.gaussiank(x, k)[0].numel()
    assert 2 * k / 3 - 1 <= n <= 4 * k / 3 + 1


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_entries_are_selected(bad):
    x = vector("normal", 100_003, 1)
    x[777] = bad
    assert 777 in kernels.gaussiank(x, 100)[0].tolist()
    assert kernels.gaussiank(torch.full((100,), bad), 10)[0].numel() == 10


def test_the_edges():
    assert kernels.gaussiank(torch.zeros(0), 3)[0].numel() == 0
    assert kernels.gaussiank(torch.ones(5), 0)[0].numel() == 0
    assert kernels.gaussiank(torch.zeros(100), 10)[0].tolist() == list(range(10))
    assert kernels.gaussiank(torch.ones(100), 10)[0].tolist() == list(range(10))
