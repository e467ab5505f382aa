import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, quick, reference, same, vector, vectors

from thinwire import kernels

CHUNKS = st.sampled_from([1, 2, 7, 16, 63, 64, 65, 100, 1000, 10_000, 200_000])


@quick
@given(vectors(), CHUNKS, st.sampled_from(DTYPES), st.integers(0, 9))
def test_equals_the_reference(x, chunk, dtype, seed):
    x = x.to(dtype)
    indices = kernels.chunk_argmax(x, chunk)
    same(indices, reference(lambda: kernels.chunk_argmax(x, chunk)))
    assert (indices // chunk).tolist() == list(range(-(-x.numel() // chunk)))
    residual = vector("heavy", x.numel(), seed)
    before = residual.clone()
    summed = kernels.chunk_argmax_sum(residual, x, chunk)
    same(summed, kernels.chunk_argmax(residual + x.float(), chunk))
    same(residual, before)


def test_ties_go_to_the_lower_index_and_nan_wins():
    x = torch.tensor([1.0, -1.0, 1.0, 0.0, 0.0, 0.0, torch.inf, torch.nan, 2.0])
    assert kernels.chunk_argmax(x, 3).tolist() == [0, 3, 7]
    with pytest.raises(ValueError, match="chunk"):
        kernels.chunk_argmax(x, 0)
