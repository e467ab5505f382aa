import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, FINITE_KINDS, KINDS, quick, reference, same, torch_threads, vector, vectors

from thinwire import kernels

LENGTHS = (0, 1, 2, 3, 5, 63, 64, 130, 300, 1000, 4095, 4096, 4097, 5000, 8192, 20_001)
seeds = st.integers(0, 2**63 - 1)


def rotated(x, seed):
    out = torch.empty(x.numel())
    kernels.rotate(x, seed, out)
    return out


def back(x, seed):
    out = torch.empty(x.numel())
    kernels.rotate_back(x, seed, out)
    return out


@quick
@given(vectors(KINDS, LENGTHS), seeds, st.sampled_from(DTYPES))
def test_both_backends_compute_the_same_bits(x, seed, dtype):
    x = x.to(dtype)
    for turn in (rotated, back):
        here, there = turn(x, seed), reference(lambda turn=turn: turn(x, seed))
        torch.testing.assert_close(here, there, rtol=0, atol=0, equal_nan=True)


@quick
@given(vectors(tuple(k for k in FINITE_KINDS if k != "huge"), LENGTHS), seeds)
def test_it_is_orthogonal(x, seed):
    y = rotated(x, seed)
    torch.testing.assert_close(y.double().norm(), x.double().norm(), rtol=1e-6, atol=1e-40)
    for again in (back(y, seed), rotated(back(x, seed), seed)):
        if x.numel():  # numbers below 1e-38 have few bits
            assert (again - x).abs().max() <= 1e-5 * x.abs().max() + 1e-41


@pytest.mark.parametrize("n", [8, 100, 600])
def test_rows_are_orthonormal(n):
    matrix = torch.stack([rotated(row.contiguous(), 3) for row in torch.eye(n)])
    assert torch.allclose(matrix @ matrix.T, torch.eye(n), atol=1e-5)


@pytest.mark.parametrize("n", LENGTHS)
def test_in_place_is_the_same(n):
    x = vector("normal", n, n)
    there, y = rotated(x, 7), x.clone()
    kernels.rotate(y, 7, y)
    same(y, there)
    home = back(there, 7)
    kernels.rotate_back(y, 7, y)
    same(y, home)


@pytest.mark.parametrize("spikes", [1, 2, 3])
def test_blocks_of_few_large_entries_become_normal_noise(spikes):
    """One round would leave few distinct magnitudes: the fourth moment tells."""
    x = torch.zeros(4096)
    x[torch.arange(spikes) * 1000 + 5] = torch.linspace(1.0, 0.8, spikes)
    y = torch.cat([rotated(x, seed) for seed in range(20)]).double()
    variance = float(x.double().square().sum()) / 4096
    assert float(y.square().mean()) == pytest.approx(variance, rel=1e-5)
    assert float((y**4).mean()) == pytest.approx(3 * variance**2, rel=0.05)
    assert float(y.abs().max()) < 6 * math.sqrt(variance)


def test_a_tail_is_rotated_too():
    """The last entries of a tensor that blocks do not fill spread as far as others."""
    x = torch.zeros(5000)
    x[-1] = 1.0
    y = rotated(x, 1)
    assert int((y != 0).sum()) > 4000
    assert float(y.abs().max()) < 0.1


def test_other_seeds_turn_otherwise():
    x = vector("normal", 6000, 1)
    a, b = rotated(x, 1), rotated(x, 2)
    assert abs(float((a * b).sum())) < 0.1 * float(x.square().sum())


def test_threads_give_the_same():
    x = vector("normal", 2_500_003, 1)
    with torch_threads(1):
        alone = rotated(x, 5), back(x, 5)
    with torch_threads(3):
        same((rotated(x, 5), back(x, 5)), alone)


def test_what_is_not_finite_spreads_over_its_blocks():
    x = vector("normal", 9000, 1)
    x[10] = torch.inf
    y = rotated(x, 1)
    assert not y[:4096].isfinite().any()
    assert y[4096:8192].isfinite().all()


def test_wrong_tensors_are_refused():
    with pytest.raises(TypeError, match="float32"):
        kernels.rotate(torch.zeros(4), 1, torch.zeros(4, dtype=torch.float16))
    with pytest.raises(ValueError, match="entries"):
        kernels.rotate_back(torch.zeros(4), 1, torch.zeros(5))


@quick
@given(vectors(), st.sampled_from([1, 7, 64, 4096]), st.sampled_from(DTYPES))
def test_scales_of_signs(x, bucket, dtype):
    x = x.to(dtype)
    scales = kernels.sign_scales(x, bucket)
    torch.testing.assert_close(
        scales, reference(lambda: kernels.sign_scales(x, bucket)), rtol=2e-7, atol=0, equal_nan=True
    )
    for scale, part in zip(scales, x.double().split(bucket) if x.numel() else (), strict=True):
        if part.isfinite().all():
            total = float(part.abs().sum())
            expected = float(part.square().sum()) / total if total else 0.0
            assert float(scale) == pytest.approx(expected, rel=1e-6, abs=1e-44)
        else:
            assert not scale.isfinite()
