import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, SIZES, choices, counts_for, quick, reference, same, vector, vectors

from thinwire import kernels

undos = st.sampled_from(["none", "separate", "gradient"])
RULES = ("topk", "gaussiank", "threshold")


def call(rule, prefix, residual, grad, k, **options):
    argument = 0.7 if rule == "threshold" else k
    return getattr(kernels, f"{prefix}_{rule}")(residual, grad, argument, **options)


@quick
@given(
    vectors(),
    st.integers(0, 9),
    choices,
    st.sampled_from(DTYPES),
    undos,
    st.sampled_from(RULES),
)
def test_feedback_takes_the_selection_out_of_the_sum(grad, seed, choice, dtype, undo_kind, rule):
    n = grad.numel()
    grad = grad.to(dtype)
    residual = vector("normal", n, seed) * 0.3
    before = residual.clone()
    k = counts_for(n, choice)
    total = before + grad.float()

    expected_residual = before.clone()
    expected = reference(lambda: call(rule, "feedback", expected_residual, grad.clone(), k))

    given_grad = grad.clone()
    undo = None
    if undo_kind == "separate":
        undo = torch.full((n,), 9.0)
    elif undo_kind == "gradient" and dtype == torch.float32:
        undo = given_grad
    indices, values = call(rule, "feedback", residual, given_grad, k, undo=undo)

    same((indices, values), expected)
    same(residual, expected_residual)
    same(values, total[indices.long()])
    rest = total.clone()
    rest[indices.long()] = 0.0
    same(residual, rest)
    if undo is not None:
        assert torch.equal(undo.view(torch.int32), before.view(torch.int32))
    if undo is not given_grad:
        same(given_grad, grad)


@quick
@given(vectors(), st.integers(0, 9), choices, st.sampled_from(DTYPES), st.sampled_from(RULES))
def test_selecting_then_committing_is_the_same_step(grad, seed, choice, dtype, rule):
    grad = grad.to(dtype)
    residual = vector("heavy", grad.numel(), seed)
    k = counts_for(grad.numel(), choice)
    at_once = residual.clone()
    expected = call(rule, "feedback", at_once, grad.clone(), k)
    before = residual.clone()
    selected = call(rule, "select_feedback", residual, grad, k)
    same(residual, before)
    same(selected, expected)
    kernels.commit_feedback(residual, grad, selected[0])
    same(residual, at_once)


@quick
@given(
    vectors(),
    st.integers(0, 9),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(DTYPES),
    undos,
)
def test_block_wraps_around(grad, seed, where, share, dtype, undo_kind):
    n = grad.numel()
    grad = grad.to(dtype)
    residual = vector("normal", n, seed)
    before = residual.clone()
    start, length = int(where * max(n - 1, 0)), int(share * n)
    total = before + grad.float()
    undo = None
    if undo_kind == "separate":
        undo = torch.empty(n)
    elif undo_kind == "gradient" and dtype == torch.float32:
        undo = grad
    values = kernels.feedback_block(residual, grad, start, length, undo=undo)
    block = [(start + j) % n for j in range(length)]
    same(values, total[block])
    total[block] = 0.0
    same(residual, total)
    if undo is not None:
        assert torch.equal(undo.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("n", [0, 1, 65, 100_003])
def test_a_block_with_the_output_cleared_in_the_same_pass(n, itself, dtype, backend):
    residual, grad = vector("normal", n, 1), vector("heavy", n, 2).to(dtype)
    total = residual + grad.float()
    clear = grad if itself else torch.full((n,), 7.0).to(dtype)
    start, length = n // 2, 2 * n // 3
    block = [(start + j) % n for j in range(length)]

    def call():
        return kernels.feedback_block(residual, grad, start, length, clear=clear)

    same(call() if backend == "cpu" else reference(call), total[block])
    total[block] = 0.0
    same(residual, total)
    assert bool((clear == 0).all())


@pytest.mark.parametrize("kind", ["normal", "constant", "sparse", "nan"])
@pytest.mark.parametrize("rule", RULES)
def test_a_few_entries_of_a_small_tensor(kind, rule):
    """Also where a sample shows nothing of the rest: all entries equal, or nearly all zero."""
    grad, undo = vector(kind, 1100, 3), torch.empty(1100)
    residual = torch.zeros(1100)
    expected_residual = residual.clone()
    taken = call(rule, "feedback", residual, grad, 20, undo=undo)
    same(taken, reference(lambda: call(rule, "feedback", expected_residual, grad, 20)))
    same(residual, expected_residual)
    assert not undo.any()


@pytest.mark.parametrize("n", SIZES)
def test_nothing_is_lost_over_many_steps(n):
    residual = torch.zeros(n)
    exact = torch.zeros(n, dtype=torch.float64)
    sent = torch.zeros(n, dtype=torch.float64)
    for step in range(5):
        grad = (vector("normal", n, step) * 8).round()  # integers: sums are exact in float32
        exact += grad.double()
        indices, values = kernels.feedback_topk(residual, grad, n // 10)
        sent.index_add_(0, indices, values.double())
    assert torch.equal(sent + residual.double(), exact)


def test_large_step_with_a_bad_sample_still_selects_exactly():
    n = 2_000_000
    grad = torch.full((n,), 1e-3)
    grad[:: n // 4096] = 7.0
    residual = torch.zeros(n)
    indices, values = kernels.feedback_topk(residual, grad, 20_000)
    expected = reference(lambda: kernels.topk(grad, 20_000))
    same((indices, values), expected)
    assert int((residual == 0).sum()) == 20_000


def test_wrong_arguments_are_refused():
    r, g = torch.zeros(8), torch.zeros(8)
    with pytest.raises(ValueError, match="entries"):
        kernels.feedback_topk(r, torch.zeros(9), 1)
    with pytest.raises(ValueError, match="entries"):
        kernels.feedback_topk(r, g, 1, undo=torch.zeros(7))
    with pytest.raises(TypeError, match="float32"):
        kernels.feedback_topk(r.bfloat16(), g, 1)
    with pytest.raises(ValueError, match="fit"):
        kernels.feedback_block(r, g, 8, 1)
    with pytest.raises(ValueError, match="fit"):
        kernels.feedback_block(r, g, 0, 9)
    with pytest.raises(ValueError, match="not both"):
        kernels.feedback_block(r, g, 0, 1, undo=torch.zeros(8), clear=torch.zeros(8))
    with pytest.raises(ValueError, match="entries"):
        kernels.feedback_block(r, g, 0, 1, clear=torch.zeros(7))
    for hostile in ([8], [-1], [3, 3], [4, 2]):
        with pytest.raises(kernels.PayloadError):
            kernels.commit_feedback(r, g, torch.tensor(hostile, dtype=torch.int32))
    with pytest.raises(kernels.PayloadError):
        kernels.commit_feedback(r, g, torch.tensor([1]))
