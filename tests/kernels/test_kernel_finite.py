import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, quick, vectors

from thinwire import kernels


@quick
@given(vectors(), st.sampled_from(DTYPES))
def test_all_finite(x, dtype):
    x = x.to(dtype)
    assert kernels.all_finite(x) == bool(torch.isfinite(x).all())


def test_one_bad_entry_anywhere():
    x = torch.zeros(100_003)
    for where in (0, 63, 64, 4095, 4096, 100_002):
        for bad in (torch.inf, -torch.inf, torch.nan):
            x[where] = bad
            assert not kernels.all_finite(x)
        x[where] = 0.0
    assert kernels.all_finite(x)
