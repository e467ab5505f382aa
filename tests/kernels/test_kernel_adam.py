import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, quick, reference, same, torch_threads, vector, vectors

from thinwire import kernels

KINDS = st.sampled_from(("normal", "zeros", "sparse", "denormal", "huge", "ties"))


def magnitudes(kind: str, n: int, seed: int) -> torch.Tensor:
    return vector(kind, n, seed).abs()


@quick
@given(vectors(), KINDS, KINDS, st.sampled_from(DTYPES), st.sampled_from([0.0, 0.5, 0.9]), st.booleans())
def test_momentum_equals_the_reference(x, before, now, dtype, beta, in_place):
    x, n = x.to(dtype), x.numel()
    m, roots = vector("heavy", n, 1), tuple(magnitudes(k, n, s) for s, k in enumerate((now, before, now)))
    kept = [tensor.clone() for tensor in (m, *roots)]
    for squares in (None, roots):
        expected, grad = torch.empty_like(x), x.clone()
        grown = reference(lambda known=squares, to=expected: kernels.adam_momentum(m, x, known, beta, to))
        out = grad if in_place else torch.empty_like(x)
        mine = kernels.adam_momentum(m, grad, squares, beta, out)
        same(out, expected)
        assert (mine is None) == (grown is None) == (squares is None)
        if mine is not None:  # the last bit of a root is torch's own affair
            finite = x.isfinite()
            assert torch.allclose(mine[finite], grown[finite], rtol=3e-7, atol=1e-44)
            assert not mine[~finite].isfinite().any()
    for tensor, old in zip((m, *roots), kept, strict=True):
        same(tensor, old)


def test_a_scale_without_a_finite_value_is_one():
    ones, x = torch.ones(5), torch.full((5,), 2.0)
    s_0, s = torch.tensor([0.0, 1.0, 3.0, 0.0, 1e38]), torch.tensor([0.0, 0.0, 1.5, 1.0, 1e-30])
    out = torch.empty(5)
    grown = kernels.adam_momentum(ones, x, (ones, s_0, s), 0.0, out)
    assert out.tolist() == [2, 2, 4, 0, 2]
    assert torch.allclose(grown, torch.full((5,), 5.0**0.5))


@quick
@given(vectors(), KINDS, st.sampled_from(DTYPES), st.booleans())
def test_keeping_equals_the_reference(x, kind, dtype, has_squares):
    out = x.to(dtype)
    s = magnitudes(kind, x.numel(), 2) if has_squares else None
    expected, m, other = out.clone(), torch.empty_like(x), torch.empty_like(x)
    reference(lambda: kernels.adam_keep(expected, s, other))
    same(other, out.float())
    kernels.adam_keep(out, s, m)
    same(out, expected)
    same(m, other)
    assert s is None or not out[s == 0].any()


def test_threads_change_nothing():
    n = (1 << 21) + 77
    m, x, *roots = (vector("normal", n, seed) for seed in range(5))
    results = []
    for threads in (1, 3):
        with torch_threads(threads):
            out, kept = torch.empty(n), torch.empty(n)
            grown = kernels.adam_momentum(m, x, tuple(root.abs() for root in roots), 0.9, out)
            kernels.adam_keep(out, roots[0], kept)
            results.append((grown, out, kept))
    same(*results)


def test_double_precision_goes_to_the_reference():
    m, x, out = torch.ones(3), torch.arange(3.0).double(), torch.empty(3).double()
    assert kernels.adam_momentum(m, x, None, 0.5, out) is None
    assert out.tolist() == [0.5, 1.0, 1.5]


def test_wrong_tensors_are_refused():
    m, x = torch.ones(3), torch.ones(3)
    for bad in (torch.ones(4), torch.ones(3).int(), torch.ones(2, 3)[:, 0]):
        with pytest.raises((TypeError, ValueError)):
            kernels.adam_momentum(m, bad, None, 0.9, x)
        with pytest.raises((TypeError, ValueError)):
            kernels.adam_momentum(m, x, (m, m, bad), 0.9, x)
        with pytest.raises((TypeError, ValueError)):
            kernels.adam_keep(bad, None, m)
    with pytest.raises(TypeError, match="like grad"):
        kernels.adam_momentum(m, x, None, 0.9, x.half())
