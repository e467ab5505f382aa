import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, SIZES, quick, reference, same, vector, vectors

from thinwire import kernels


@quick
@given(vectors(), st.integers(0, 99), st.sampled_from(DTYPES))
def test_equals_the_reference(x, seed, dtype):
    x = x.to(dtype)
    n = x.numel()
    packed = kernels.natural_quantise(x, seed)
    same(packed, reference(lambda: kernels.natural_quantise(x, seed)))
    assert packed.numel() == n + 1
    out, expected = torch.empty(n), torch.empty(n)
    kernels.natural_dequantise(packed, n, out)
    reference(lambda: kernels.natural_dequantise(packed, n, expected))
    same(out, expected)
    if bool(torch.isfinite(x).all()):
        big = x.float().abs() >= 2.0**-126
        ratio = out[big] / x[big].float()
        assert bool(((ratio > 0.5) & (ratio <= 2.0)).all())


@quick
@given(st.sampled_from(SIZES), st.integers(1, 5), st.sampled_from(DTYPES))
def test_mean_equals_the_reference(n, workers, dtype):
    packed = [kernels.natural_quantise(vector("heavy", n, w), w) for w in range(workers)]
    out, expected = torch.empty(n).to(dtype), torch.empty(n).to(dtype)
    kernels.natural_mean(packed, n, out)
    reference(lambda: kernels.natural_mean(packed, n, expected))
    same(out, expected)


def test_unbiased():
    x = vector("normal", 1000, 3)
    out, total, draws = torch.empty(1000), torch.zeros(1000, dtype=torch.float64), 500
    for seed in range(draws):
        kernels.natural_dequantise(kernels.natural_quantise(x, seed), 1000, out)
        total += out
    below = 2.0 ** x.abs().double().log2().floor()
    share = x.abs().double() / below - 1
    spread = share * (1 - share)
    z = (total / draws - x) / (below * (spread / draws).sqrt())
    enough = spread * draws > 5
    assert float(z[enough].abs().max()) < 5.5
    assert abs(float(z[enough].mean())) < 5 / float(enough.sum()) ** 0.5


def test_a_range_wider_than_seven_bits_underflows_stochastically():
    x = torch.full((100_000,), 2.0**-101)
    x[0] = 2.0**26
    out = torch.empty(100_000)
    kernels.natural_dequantise(kernels.natural_quantise(x, 1), 100_000, out)
    assert set(out[1:].unique().tolist()) == {0.0, 2.0**-99}
    kept = float((out[1:] > 0).double().mean())
    assert abs(kept - 0.25) < 5 * (0.25 * 0.75 / 1e5) ** 0.5


def test_largest_numbers_stay_finite_and_non_finite_ones_become_nan():
    x = torch.full((100,), 3.4e38)
    out = torch.empty(100)
    kernels.natural_dequantise(kernels.natural_quantise(x, 1), 100, out)
    assert bool((out == 2.0**127).all())
    x[5] = -torch.inf
    kernels.natural_dequantise(kernels.natural_quantise(x, 1), 100, out)
    assert bool(out.isnan().all())


def test_hostile_payloads_are_refused():
    packed = kernels.natural_quantise(torch.ones(100), 0)
    out = torch.zeros(100)
    impossible = packed.clone()
    impossible[100] = 128
    for bad in (packed[:-1], torch.cat([packed, packed]), packed[:0], packed.float(), impossible):
        with pytest.raises(kernels.PayloadError):
            kernels.natural_dequantise(bad, 100, out)
        with pytest.raises(kernels.PayloadError):
            kernels.natural_mean([packed, bad], 100, out)
