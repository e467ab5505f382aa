import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, FINITE_KINDS, quick, reference, same, torch_threads, vector, vectors

from thinwire import kernels

BUCKETS = st.sampled_from([4096, 12288])
SHARES = st.sampled_from([8, 64, 4096, 4104, 30_000, 200_000])


def stretches(n: int, share: int) -> list[slice]:
    return [slice(begin, min(begin + share, n)) for begin in range(0, n, share)]


@quick
@given(vectors(), st.sampled_from(DTYPES), BUCKETS, SHARES)
def test_signs_are_those_of_the_sum_in_each_stretch(x, dtype, bucket, share):
    if x.numel() > 2000 * share:
        share = 4104
    x, residual = x.to(dtype), vector("heavy", x.numel(), 5)
    before, total = residual.clone(), residual + x.float()
    bits, means = kernels.feedback_signs(residual, x, bucket, share)
    coded = [kernels.sign_pack_means(total[each], bucket) for each in stretches(len(total), share)]
    empty = kernels.sign_pack_means(total[:0], bucket)
    same(bits, torch.cat([empty[0], *(packed for packed, _ in coded)]))
    same(means, torch.cat([empty[1], *(each for _, each in coded)]))
    expected = reference(lambda: kernels.feedback_signs(residual, x, bucket, share))
    same(bits, expected[0])
    assert torch.allclose(means, expected[1], rtol=1e-6, atol=0, equal_nan=True)
    same(residual, before)


@quick
@given(vectors(FINITE_KINDS), st.sampled_from(DTYPES), BUCKETS, SHARES)
def test_a_commit_subtracts_what_was_coded(x, dtype, bucket, share):
    if x.numel() > 2000 * share:
        share = 4104
    x, n = x.to(dtype).nan_to_num(posinf=1.0, neginf=-1.0), x.numel()
    residual = vector("normal", n, 5)
    left = residual + x.float()
    bits, means = kernels.feedback_signs(residual, x, bucket, share)
    expected, at = residual.clone(), 0
    for each in stretches(n, share):
        part = left[each]
        decoded, count = torch.empty_like(part), -(-part.numel() // bucket)
        code = bits[each.start // 8 : -(-each.stop // 8)]
        kernels.sign_means([code], [means[at : at + count]], bucket, part.numel(), decoded)
        part -= decoded
        at += count
    reference(lambda: kernels.commit_signs(expected, x, means, bucket, share))
    kernels.commit_signs(residual, x, means, bucket, share)
    same(residual, expected)
    same(residual, left)


@quick
@given(vectors(FINITE_KINDS), st.sampled_from(DTYPES), BUCKETS, st.integers(1, 5))
def test_the_second_signs(x, dtype, bucket, others):
    x, n = x.to(dtype).nan_to_num(posinf=1.0, neginf=-1.0), x.numel()
    residual = vector("normal", n, 5)
    sent = [kernels.sign_pack_means(vector("shifted", n, w) - 5, bucket) for w in range(others)]
    codes, scales = [code for code, _ in sent], [scale for _, scale in sent]
    mean, bits, means = kernels.signs_again(residual, x, codes, scales, bucket)
    expected = reference(lambda: kernels.signs_again(residual, x, codes, scales, bucket))
    same(mean, expected[0])
    same((bits, means), kernels.sign_pack_means(mean, bucket))
    decoded = torch.empty(n)
    kernels.sign_means(codes, scales, bucket, n, decoded)
    by_hand = (residual + x.float()).double() / (others + 1) + decoded.double() * others / (others + 1)
    assert torch.allclose(
        mean.double(), by_hand, rtol=1e-5, atol=1e-6 * float(by_hand.abs().max()) if n else 0
    )
    lost, other = torch.empty(n), torch.empty(n)
    kernels.lost_by_signs(mean, means, bucket, others + 1, lost)
    reference(lambda: kernels.lost_by_signs(mean, means, bucket, others + 1, other))
    same(lost, other)
    kernels.sign_means([bits], [means], bucket, n, decoded)
    same(lost, (mean - decoded) * (others + 1))


@quick
@given(vectors(FINITE_KINDS), st.sampled_from(DTYPES), BUCKETS, st.integers(1, 5))
def test_stretches_are_joined(x, dtype, bucket, owners):
    n = x.numel()
    share = max(8, -(-n // 8 // owners) * 8 + 8)
    longest = min(share, n)
    sent = [kernels.sign_pack_means(vector("normal", longest, w), bucket) for w in range(owners)]
    codes, scales = [code for code, _ in sent], [scale for _, scale in sent]
    out, expected, decoded = (torch.empty(n).to(dtype) for _ in range(3))
    kernels.signs_joined(codes, scales, bucket, share, out)
    reference(lambda: kernels.signs_joined(codes, scales, bucket, share, expected))
    same(out, expected)
    for each, code, scale in zip(stretches(n, share), codes, scales, strict=False):
        whole = torch.empty(longest)
        kernels.sign_means([code], [scale], bucket, longest, whole)
        decoded[each] = whole[: each.stop - each.start].to(dtype)
    same(out, decoded)


def test_threads_change_nothing():
    n, share = (1 << 21) + 77, 700_000
    residual, x = vector("normal", n, 1), vector("normal", n, 2)
    results = []
    for threads in (1, 3):
        with torch_threads(threads):
            kept, out = residual.clone(), torch.empty(n)
            bits, means = kernels.feedback_signs(residual, x, 4096, share)
            kernels.commit_signs(kept, x, means, 4096, share)
            again = kernels.signs_again(residual, x, [bits], [kernels.sign_pack_means(x, 4096)[1]], 4096)
            kernels.signs_joined([bits[: share // 8]] * 3, [means[:171]] * 3, 4096, share, out)
            results.append((bits, means, kept, *again, out))
    same(*results)


def test_hostile_payloads_are_refused():
    residual, x, out = torch.zeros(5000), torch.ones(5000), torch.zeros(5000)
    bits, means = kernels.sign_pack_means(x, 4096)
    for bad in (means[:1], torch.cat([means, means]), means.double(), means[:0]):
        with pytest.raises(kernels.PayloadError):
            kernels.signs_again(residual, x, [bits], [bad], 4096)
        with pytest.raises(kernels.PayloadError):
            kernels.signs_joined([bits], [bad], 4096, 5000, out)
        with pytest.raises(kernels.PayloadError):
            kernels.commit_signs(residual, x, bad, 4096, 5000)
        with pytest.raises(kernels.PayloadError):
            kernels.lost_by_signs(x, bad, 4096, 2.0, out)
    for bad in (bits[:-1], torch.cat([bits, bits]), bits.float(), bits[:0]):
        with pytest.raises(kernels.PayloadError):
            kernels.signs_again(residual, x, [bits, bad], [means] * 2, 4096)
        with pytest.raises(kernels.PayloadError):
            kernels.signs_joined([bad], [means], 4096, 5000, out)
    with pytest.raises(kernels.PayloadError):
        kernels.signs_again(residual, x, [], [], 4096)
    with pytest.raises(ValueError, match="stretches"):
        kernels.signs_joined([bits[:8]], [means[:1]], 4096, 64, out)
    for bucket, share in ((100, 8), (4096, 0), (4096, 12), (0, 8)):
        with pytest.raises(ValueError, match=r"bucket|share"):
            kernels.feedback_signs(residual, x, bucket, share)
