import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, SIZES, quick, reference, same, torch_threads, vector, vectors

from thinwire import kernels
from thinwire.kernels import PerChunk

shapes = st.sampled_from(
    [PerChunk(1, 1), PerChunk(1, 7), PerChunk(3, 64), PerChunk(41, 4096), PerChunk(64, 64)]
)


@quick
@given(vectors(), shapes, st.sampled_from(DTYPES))
def test_every_chunk_gives_its_own_largest(x, per, dtype):
    x = x.to(dtype)
    indices, values = kernels.chunk_topk(x, per)
    same((indices, values), reference(lambda: kernels.chunk_topk(x, per)))
    assert indices.numel() == per.total(x.numel())
    parts = list(enumerate(x.split(per.chunk) if x.numel() else ()))
    for c, part in (*parts[:10], *parts[10:-10:97], *parts[10:][-10:]):  # the first, the last and some others
        k = per.k if part.numel() == per.chunk else per.of_last(x.numel())
        mine = indices[c * per.k : c * per.k + k] - c * per.chunk
        same((mine.contiguous(), values[c * per.k : c * per.k + k]), kernels.topk(part.contiguous(), k))


@quick
@given(
    vectors(),
    st.integers(0, 9),
    shapes,
    st.sampled_from(DTYPES),
    st.sampled_from(["none", "separate", "gradient"]),
)
def test_feedback_takes_the_selection_out_of_the_sum(grad, seed, per, dtype, undo_kind):
    n, grad = grad.numel(), grad.to(dtype)
    residual = vector("normal", n, seed) * 0.3
    before, total = residual.clone(), residual + grad.float()
    expected = kernels.chunk_topk(total, per)
    same(kernels.select_feedback_chunk_topk(residual, grad, per), expected)
    same(residual, before)
    given_grad = grad.clone()
    undo = None
    if undo_kind == "separate":
        undo = torch.full((n,), 9.0)
    elif undo_kind == "gradient" and dtype == torch.float32:
        undo = given_grad
    same(kernels.feedback_chunk_topk(residual, given_grad, per, undo), expected)
    total[expected[0].long()] = 0.0
    same(residual, total)
    if undo is not None:
        assert torch.equal(undo.view(torch.int32), before.view(torch.int32))


def test_scales_that_jump_from_chunk_to_chunk_are_followed():
    """The guess of one chunk is far too low or too high for the next."""
    scales = 10.0 ** torch.randint(-20, 20, (60,), generator=torch.Generator().manual_seed(1))
    x = (torch.randn(60, 256, generator=torch.Generator().manual_seed(2)) * scales[:, None]).flatten()
    per = PerChunk(5, 256)
    same(kernels.chunk_topk(x, per), reference(lambda: kernels.chunk_topk(x, per)))


def test_threads_give_the_same():
    x, r = vector("normal", 2_500_003, 1), vector("heavy", 2_500_003, 2)
    per = PerChunk(13, 1000)
    with torch_threads(1):
        alone = kernels.feedback_chunk_topk(r.clone(), x, per)
    with torch_threads(3):
        same(kernels.feedback_chunk_topk(r.clone(), x, per), alone)
        same(kernels.chunk_topk(r + x, per), alone)


@pytest.mark.parametrize("n", SIZES)
def test_the_number_of_entries_is_known_beforehand(n):
    for per in (PerChunk(1, 7), PerChunk(41, 4096), PerChunk(64, 64)):
        total = per.total(n)
        assert total == kernels.chunk_topk(torch.randn(n), per)[0].numel()
        assert total <= n
        assert total >= n * per.k // per.chunk


@pytest.mark.parametrize("per", [PerChunk(0, 10), PerChunk(11, 10), PerChunk(1, 0)])
def test_impossible_counts_are_refused(per):
    with pytest.raises(ValueError, match="from 1 to the chunk's"):
        kernels.chunk_topk(torch.zeros(30), per)
