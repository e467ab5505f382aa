import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, FINITE_KINDS, quick, reference, same, vector, vectors

from thinwire import kernels


@quick
@given(vectors(FINITE_KINDS), st.sampled_from(DTYPES))
def test_means_equal_the_reference(x, dtype):
    x = x.to(dtype).nan_to_num(posinf=1.0, neginf=-1.0)
    # Sums in double precision, rounded to single: they may differ in the last bit.
    expected = reference(lambda: kernels.two_means(x)).tolist()
    assert kernels.two_means(x).tolist() == pytest.approx(expected, rel=2e-7, abs=3e-45)


@quick
@given(vectors(), st.booleans(), st.sampled_from(DTYPES))
def test_apply_equals_the_reference(x, in_place, dtype):
    x = x.to(dtype)
    expected = torch.empty_like(x)
    own, mean = torch.tensor([0.5, -0.25]), torch.tensor([0.3, -0.75])
    reference(lambda: kernels.a2sgd_apply(x, own, mean, expected))
    out = x.clone() if in_place else torch.empty_like(x)
    kernels.a2sgd_apply(out if in_place else x, own, mean, out)
    same(out, expected)


@quick
@given(vectors(FINITE_KINDS))
def test_one_worker_changes_nothing(x):
    mu = kernels.two_means(x)
    out = torch.empty_like(x)
    kernels.a2sgd_apply(x, mu, mu, out)
    same(out, x + 0.0)  # -0.0 becomes 0.0


def test_empty_classes_and_non_finite_input():
    for call in (kernels.two_means, lambda x: reference(lambda: kernels.two_means(x))):
        assert call(torch.ones(5)).tolist() == [1.0, 0.0]
        assert call(-torch.ones(5)).tolist() == [0.0, -1.0]
        assert call(torch.zeros(0)).tolist() == [0.0, 0.0]
    x = vector("normal", 1000, 0)
    x[3] = torch.nan
    assert kernels.two_means(x).isnan().any()
