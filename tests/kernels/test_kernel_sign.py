import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, FINITE_KINDS, SIZES, quick, reference, same, vector, vectors

from thinwire import kernels


@quick
@given(vectors(), st.sampled_from(DTYPES))
def test_packing_equals_the_reference(x, dtype):
    x = x.to(dtype)
    packed = kernels.sign_pack(x)
    same(packed, reference(lambda: kernels.sign_pack(x)))
    n = x.numel()
    assert packed.numel() == -(-n // 8)
    out = torch.empty(n)
    kernels.sign_unpack(packed, torch.tensor([0.25]), n, out)
    same(out, torch.where(x >= 0, 0.25, -0.25))


@quick
@given(vectors(FINITE_KINDS), st.sampled_from(DTYPES))
def test_means_beside_the_bits(x, dtype):
    x = x.to(dtype).nan_to_num(posinf=1.0, neginf=-1.0)
    # The mean magnitude is in double precision, the two means are in single.
    for name, rel in (("sign_pack_mean", 1e-12), ("onebit_pack", 2e-7)):
        got = getattr(kernels, name)(x)
        expected = reference(lambda name=name: getattr(kernels, name)(x))
        same(got[0], expected[0])
        assert got[1].dtype == expected[1].dtype
        assert got[1].tolist() == pytest.approx(expected[1].tolist(), rel=rel, abs=3e-45)


@quick
@given(st.sampled_from(SIZES), st.integers(1, 9), st.sampled_from(DTYPES))
def test_mean_over_workers_equals_the_reference(n, workers, dtype):
    packed = [kernels.sign_pack(vector("normal", n, w)) for w in range(workers)]
    scales = [torch.tensor([0.3 + w]) for w in range(workers)]
    pairs = [torch.tensor([0.3 + w, -0.1 * w]) for w in range(workers)]
    for call in (
        lambda out: kernels.sign_mean(packed, scales, n, out),
        lambda out: kernels.onebit_mean(packed, pairs, n, out),
    ):
        out, expected = torch.empty(n).to(dtype), torch.empty(n).to(dtype)
        call(out)
        reference(lambda call=call, expected=expected: call(expected))
        same(out, expected)


@quick
@given(vectors(FINITE_KINDS), st.sampled_from(DTYPES), st.sampled_from([4096, 12288]), st.integers(1, 5))
def test_buckets_equal_the_reference(x, dtype, bucket, workers):
    x = x.to(dtype).nan_to_num(posinf=1.0, neginf=-1.0)
    n, sent = x.numel(), []
    for w in range(workers):
        given = x * (w + 1)
        packed, means = kernels.sign_pack_means(given, bucket)
        bits, expected = reference(lambda given=given: kernels.sign_pack_means(given, bucket))
        same(packed, bits)
        assert torch.allclose(means, expected, rtol=1e-6, atol=0)
        sent.append((packed, means))
    codes, scales = [c for c, _ in sent], [s for _, s in sent]
    out, expected = torch.empty(n).to(dtype), torch.empty(n).to(dtype)
    kernels.sign_means(codes, scales, bucket, n, out)
    reference(lambda: kernels.sign_means(codes, scales, bucket, n, expected))
    same(out, expected)


def test_hostile_buckets_are_refused():
    packed, scales = kernels.sign_pack_means(torch.ones(5000), 4096)
    out = torch.zeros(5000)
    for bad in (scales[:1], torch.cat([scales, scales]), scales.double(), scales[:0]):
        with pytest.raises(kernels.PayloadError):
            kernels.sign_means([packed], [bad], 4096, 5000, out)
    with pytest.raises(kernels.PayloadError):
        kernels.sign_means([packed[:-1]], [scales], 4096, 5000, out)
    for bucket in (0, 100, -4096):
        with pytest.raises(ValueError, match="bucket"):
            kernels.sign_means([packed], [scales], bucket, 5000, out)


@quick
@given(st.sampled_from(SIZES), st.sampled_from([1, 2, 3, 4, 7, 8, 15, 16, 17, 33]))
def test_majority_equals_the_reference(n, workers):
    packed = [kernels.sign_pack(vector("normal", n, w)) for w in range(workers)]
    majority = kernels.sign_majority(packed, n)
    same(majority, reference(lambda: kernels.sign_majority(packed, n)))


def test_a_tie_is_positive():
    n = 9
    plus, minus = kernels.sign_pack(torch.ones(n)), kernels.sign_pack(-torch.ones(n))
    same(kernels.sign_majority([plus, minus], n), plus)
    same(kernels.sign_majority([minus, plus, minus], n), minus)


def test_hostile_lengths_are_refused():
    packed = kernels.sign_pack(torch.ones(100))
    out = torch.zeros(100)
    for bad in (packed[:-1], torch.cat([packed, packed]), packed.float(), packed[:0]):
        with pytest.raises(kernels.PayloadError):
            kernels.sign_unpack(bad, torch.ones(1), 100, out)
        with pytest.raises(kernels.PayloadError):
            kernels.sign_mean([packed, bad], [torch.ones(1)] * 2, 100, out)
        with pytest.raises(kernels.PayloadError):
            kernels.sign_majority([packed, bad], 100)
    with pytest.raises(kernels.PayloadError):
        kernels.sign_mean([packed, packed], [torch.ones(1)], 100, out)
    for bad in (torch.ones(2), torch.ones(1).double(), torch.ones(0)):
        with pytest.raises(kernels.PayloadError):
            kernels.sign_mean([packed], [bad], 100, out)
    with pytest.raises(kernels.PayloadError):
        kernels.onebit_mean([packed], [torch.ones(1)], 100, out)
    with pytest.raises(kernels.PayloadError):
        kernels.sign_majority([], 100)
