import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, choices, counts_for, quick, reference, same, vectors

from thinwire import kernels

THRESHOLDS = (-1.0, -0.0, 0.0, 1e-40, 0.5, 3.0, 1e30, math.inf)


@quick
@given(vectors(), choices, st.sampled_from(DTYPES))
def test_topk_equals_the_reference(x, choice, dtype):
    x = x.to(dtype)
    k = counts_for(x.numel(), choice)
    indices, values = kernels.topk(x, k)
    same((indices, values), reference(lambda: kernels.topk(x, k)))
    assert indices.numel() == min(k, x.numel())
    assert indices.dtype == torch.int32
    assert bool((indices[1:] > indices[:-1]).all())
    same(values, x[indices.long()].float())


@quick
@given(vectors(), st.sampled_from(THRESHOLDS), st.sampled_from(DTYPES))
def test_threshold_equals_the_reference(x, t, dtype):
    x = x.to(dtype)
    indices, values = kernels.threshold(x, t)
    same((indices, values), reference(lambda: kernels.threshold(x, t)))
    above = ~(x.float().abs() <= t)
    assert indices.tolist() == torch.nonzero(above).flatten().tolist()


def test_nan_ranks_above_infinity_and_ties_go_to_the_lower_index():
    x = torch.tensor([1.0, -3.0, math.inf, 3.0, math.nan, -1.0])
    assert kernels.topk(x, 1)[0].tolist() == [4]
    assert kernels.topk(x, 2)[0].tolist() == [2, 4]
    assert kernels.topk(x, 3)[0].tolist() == [1, 2, 4]


def test_topk_where_a_sample_is_blind():
    # All weight in one narrow run, which a strided sample may miss, among exact zeros.
    x = torch.zeros(3_000_000)
    x[1_234_567:1_235_567] = torch.linspace(1, 2, 1000)
    for k in (10, 1000, 1500):
        same(kernels.topk(x, k), reference(lambda k=k: kernels.topk(x, k)))


def test_topk_where_a_sample_sees_only_the_heavy_part():
    x = torch.full((2_000_000,), 1e-3)
    x[:: x.numel() // 4096] = 7.0
    same(kernels.topk(x, 20_000), reference(lambda: kernels.topk(x, 20_000)))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="negative"):
        kernels.topk(torch.zeros(3), -1)
    with pytest.raises(ValueError, match="NaN"):
        kernels.threshold(torch.zeros(3), math.nan)
    with pytest.raises(ValueError, match="flat"):
        kernels.topk(torch.zeros(3, 3), 1)
    with pytest.raises(ValueError, match="flat"):
        kernels.topk(torch.zeros(9)[::2], 1)
    with pytest.raises(TypeError, match="float32"):
        kernels.topk(torch.zeros(3, dtype=torch.int64), 1)
