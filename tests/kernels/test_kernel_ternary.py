import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, quick, reference, same, vector, vectors

from thinwire import kernels


@quick
@given(vectors(), st.sampled_from([None, 2.5, 0.5]), st.integers(0, 99), st.sampled_from(DTYPES))
def test_equals_the_reference(x, clip, seed, dtype):
    x = x.to(dtype)
    same(kernels.ternary_quantise(x, clip, seed), reference(lambda: kernels.ternary_quantise(x, clip, seed)))


def test_unbiased_for_the_clipped_tensor():
    x = vector("heavy", 1000, 3).clamp(-20, 20)
    bound = 2.5 * float(x.double().std(correction=0))
    clipped = x.clamp(-bound, bound)
    out, total, draws = torch.empty(1000), torch.zeros(1000), 500
    for seed in range(draws):
        packed, scale = kernels.ternary_quantise(x, 2.5, seed)
        kernels.dequantise(packed, scale, 2, 1000, 1000, out)
        assert set(out.unique().tolist()) <= {-scale.item(), 0.0, scale.item()}
        total += out
    p = clipped.abs() / scale
    deviation = (scale * (p * (1 - p)).clamp(min=1e-9).sqrt()) / draws**0.5
    assert float(((total / draws - clipped) / deviation).abs().max()) < 5.5


def test_edges():
    assert kernels.ternary_quantise(torch.zeros(10), 2.5, 0)[1] == 0.0
    assert kernels.ternary_quantise(torch.full((10,), 0.5), 2.5, 0)[1] == 0.5
    assert kernels.ternary_quantise(torch.tensor([1.0, torch.nan]), None, 0)[1].isnan()
    with pytest.raises(ValueError, match="clip_sigma"):
        kernels.ternary_quantise(torch.ones(3), 0.0, 0)
