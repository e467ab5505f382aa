import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, quick, reference, same, vector, vectors

from thinwire import kernels

BITS = (1, 2, 4, 8)
BUCKETS = (1, 7, 64, 512, 513, 5000, 200_000)


@quick
@given(
    vectors(),
    st.sampled_from(BITS),
    st.sampled_from(BUCKETS),
    st.integers(0, 2**64 - 1),
    st.sampled_from(DTYPES),
)
def test_max_norm_equals_the_reference(x, bits, bucket, seed, dtype):
    x = x.to(dtype)
    packed, scales = kernels.quantise(x, bits, bucket, "max", seed)
    same((packed, scales), reference(lambda: kernels.quantise(x, bits, bucket, "max", seed)))
    n = x.numel()
    assert packed.numel() == -(-bits * n // 8)
    assert scales.numel() == -(-n // bucket)
    out, expected = torch.full((n,), 5.0), torch.empty(n)
    kernels.dequantise(packed, scales, bits, bucket, n, out)
    reference(lambda: kernels.dequantise(packed, scales, bits, bucket, n, expected))
    same(out, expected)


@quick
@given(vectors(), st.sampled_from(BITS), st.sampled_from(BUCKETS), st.integers(0, 99))
def test_l2_norm_equals_the_reference(x, bits, bucket, seed):
    packed, scales = kernels.quantise(x, bits, bucket, "l2", seed)
    same((packed, scales), reference(lambda: kernels.quantise(x, bits, bucket, "l2", seed)))


@pytest.mark.parametrize(("bits", "norm"), list(itertools.product(BITS, ("max", "l2"))))
def test_unbiased(bits, norm):
    x = vector("normal", 1000, 3)
    draws = 400
    total, out = torch.zeros(1000, dtype=torch.float64), torch.empty(1000)
    for seed in range(draws):
        packed, scales = kernels.quantise(x, bits, 250, norm, seed)
        kernels.dequantise(packed, scales, bits, 250, 1000, out)
        total += out
    s = 2 ** (bits - 1) - 1
    scale = scales.repeat_interleave(250).double()
    y = x.double() / scale * s if bits > 1 else (x.double() / scale + 1) / 2
    share = y - y.floor()
    step = scale / s if bits > 1 else 2 * scale
    spread = share * (1 - share)
    z = (total / draws - x) / (step * (spread.clamp(min=1e-9) / draws).sqrt())
    enough = spread * draws > 5
    assert float(z[enough].abs().max()) < 5.5
    assert abs(float(z[enough].mean())) < 5 / float(enough.sum()) ** 0.5


@pytest.mark.parametrize("bits", BITS)
def test_zero_buckets_decode_to_zero_and_non_finite_ones_to_nan(bits):
    x = torch.ones(300)
    x[100:200] = 0.0
    x[250] = torch.inf
    out = torch.empty(300)
    kernels.dequantise(*kernels.quantise(x, bits, 100, "max", 1), bits, 100, 300, out)
    assert bool((out[:100] == 1).all())
    assert bool((out[100:200] == 0).all())
    assert bool(out[200:].isnan().all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_exact_zeros_stay_exact(bits):
    x = vector("sparse", 100_003, 2)
    out = torch.empty(100_003)
    kernels.dequantise(*kernels.quantise(x, bits, 512, "max", 1), bits, 512, 100_003, out)
    assert bool((out[x == 0] == 0).all())


@quick
@given(
    st.sampled_from([0, 1, 7, 65, 5000, 100_003]),
    st.sampled_from(BITS),
    st.sampled_from(BUCKETS),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
)
def test_mean_of_workers_equals_the_reference(n, bits, bucket, workers, dtype):
    sent = [kernels.quantise(vector("heavy", n, w), bits, bucket, "max", w) for w in range(workers)]
    packed, scales = [p for p, _ in sent], [s for _, s in sent]
    out, expected = torch.empty(n).to(dtype), torch.empty(n).to(dtype)
    kernels.dequantise_mean(packed, scales, bits, bucket, n, out)
    reference(lambda: kernels.dequantise_mean(packed, scales, bits, bucket, n, expected))
    same(out, expected)


def test_payloads_at_odd_addresses():
    n = 10_001
    sent = [kernels.quantise(vector("normal", n, w), 4, 100, "max", w) for w in range(2)]
    out, expected = torch.empty(n), torch.empty(n)
    kernels.dequantise_mean([p for p, _ in sent], [s for _, s in sent], 4, 100, n, expected)
    wire = torch.cat([torch.zeros(1, dtype=torch.uint8), sent[0][0], sent[1][0]])
    b = sent[0][0].numel()
    kernels.dequantise_mean([wire[1 : 1 + b], wire[1 + b :]], [s for _, s in sent], 4, 100, n, out)
    same(out, expected)


def test_seeds_matter_and_repeat():
    x = vector("normal", 10_000, 0)
    a = kernels.quantise(x, 4, 512, "max", 1)
    same(a, kernels.quantise(x, 4, 512, "max", 1))
    assert not torch.equal(a[0], kernels.quantise(x, 4, 512, "max", 2)[0])
    assert not torch.equal(a[0], kernels.quantise(x, 4, 512, "max", 1 + 2**32)[0])
    same(kernels.quantise(x, 4, 512, "max", -1), kernels.quantise(x, 4, 512, "max", 2**64 - 1))


@pytest.mark.parametrize("bits", BITS)
def test_hostile_lengths_are_refused(bits):
    n, bucket = 1000, 64
    packed, scales = kernels.quantise(torch.ones(n), bits, bucket, "max", 0)
    out = torch.zeros(n)
    hostile = [
        (packed[:-1], scales),
        (torch.cat([packed, packed[:1]]), scales),
        (packed[:0], scales),
        (packed, scales[:-1]),
        (packed, torch.cat([scales, scales])),
        (packed.to(torch.int8), scales),
        (packed, scales.double()),
        (packed.view(1, -1), scales),
    ]
    for p, s in hostile:
        with pytest.raises(kernels.PayloadError):
            kernels.dequantise(p, s, bits, bucket, n, out)
        with pytest.raises(kernels.PayloadError):
            kernels.dequantise_mean([packed, p], [scales, s], bits, bucket, n, out)
    with pytest.raises(kernels.PayloadError):
        kernels.dequantise_mean([packed], [scales, scales], bits, bucket, n, out)
    with pytest.raises(kernels.PayloadError):
        kernels.dequantise_mean([], [], bits, bucket, n, out)
    with pytest.raises(ValueError, match="entries"):
        kernels.dequantise(packed, scales, bits, bucket, n, torch.zeros(n - 1))
    with pytest.raises(ValueError, match="bits"):
        kernels.dequantise(packed, scales, 3, bucket, n, out)
    with pytest.raises(ValueError, match="bucket"):
        kernels.quantise(out, bits, 0, "max", 0)
    with pytest.raises(ValueError, match="norm"):
        kernels.quantise(out, bits, 1, "l1", 0)


@pytest.mark.parametrize("bits", BITS)
def test_any_bytes_decode_without_harm(bits):
    n = 10_001
    rng = torch.Generator().manual_seed(bits)
    packed = torch.randint(0, 256, (-(-bits * n // 8),), dtype=torch.uint8, generator=rng)
    scales = torch.randn(-(-n // 100), generator=rng)
    out, expected = torch.empty(n), torch.empty(n)
    kernels.dequantise(packed, scales, bits, 100, n, out)
    reference(lambda: kernels.dequantise(packed, scales, bits, 100, n, expected))
    same(out, expected)


@pytest.mark.parametrize("bits", [2, 4])
def test_decoding_by_tables_and_by_arithmetic_give_equal_bits(bits):
    """Which of the two is compiled depends on the processor; here on ours, both if it can."""
    import numba
    import numpy as np

    from thinwire.kernels.cpu import _simd_codes

    n = 64 * 20
    packed = [np.random.default_rng(w).integers(0, 256, n * bits // 8, dtype=np.uint8) for w in range(5)]
    addresses = np.array([p.ctypes.data for p in packed], np.uint64)
    steps = np.array([0.3, 1e-40, -2e37, 1.7e-5, 0.0], np.float32)
    s = 2 ** (bits - 1) - 1
    expected = np.zeros(n, np.float32)
    for p, step in zip(packed, steps, strict=True):
        codes = np.stack([(p >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], 1).ravel()
        expected += (codes.astype(np.float32) - np.float32(s)) * step
    for tables in {False, _simd_codes.has_tables()}:
        decode = _simd_codes.sum_decoder(tables)

        @numba.njit
        def run(out, addresses, steps, decode=decode):
            for at in range(0, len(out), 64):
                decode(bits, out, at, addresses, at * bits // 8, steps, len(steps), np.float32(0.5))

        out = np.empty(n, np.float32)
        run(out, addresses, steps)
        same(torch.from_numpy(out), torch.from_numpy(expected * np.float32(0.5)))
