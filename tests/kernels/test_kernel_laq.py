import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, FINITE_KINDS, quick, reference, same, vector, vectors

from thinwire import kernels

BITS = range(1, 9)


@quick
@given(vectors(), st.integers(0, 9), st.sampled_from(BITS), st.sampled_from(DTYPES))
def test_equals_the_reference(grad, seed, bits, dtype):
    grad = grad.to(dtype)
    last = vector("normal", grad.numel(), seed)
    packed, radius = kernels.laq_quantise(grad, last, bits)
    same((packed, radius), reference(lambda: kernels.laq_quantise(grad, last, bits)))
    if not math.isfinite(radius):
        return
    a, b = last.clone(), last.clone()
    norms = kernels.laq_norms(grad, last, packed, radius, bits)
    kernels.laq_apply(a, packed, radius, bits)
    reference(lambda: kernels.laq_apply(b, packed, radius, bits))
    same(a, b)
    at_once = last.clone()
    same(kernels.laq_quantise(grad, at_once, bits, update=True), (packed, radius))
    same(at_once, b)
    expected = reference(lambda: kernels.laq_norms(grad, last, packed, radius, bits))
    assert norms == pytest.approx(expected, rel=1e-9, abs=1e-60)


@quick
@given(vectors(tuple(k for k in FINITE_KINDS if k not in ("huge", "denormal"))), st.sampled_from(BITS))
def test_error_is_at_most_half_a_step(grad, bits):
    last = vector("normal", grad.numel(), 4)
    packed, radius = kernels.laq_quantise(grad, last, bits)
    kernels.laq_apply(last, packed, radius, bits)
    bound = radius / (2**bits - 1)
    if grad.numel():
        slack = 1e-6 * (radius + float(grad.abs().max()))
        assert float((last - grad).abs().max()) <= bound + slack


def test_edges():
    x = vector("normal", 100, 0)
    packed, radius = kernels.laq_quantise(x, x.clone(), 4)
    assert radius == 0.0
    state = x.clone()
    kernels.laq_apply(state, packed, radius, 4)
    same(state, x)
    x[3] = torch.inf
    assert math.isnan(kernels.laq_quantise(x, state, 4)[1])
    before = state.clone()
    kernels.laq_quantise(x, state, 4, update=True)
    same(state, before)


def test_hostile_payloads_are_refused():
    last = torch.zeros(100)
    packed, radius = kernels.laq_quantise(torch.ones(100), last, 4)
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(kernels.PayloadError):
            kernels.laq_apply(last, packed, bad, 4)
    for codes in (packed[:-1], torch.cat([packed, packed]), packed.float()):
        with pytest.raises(kernels.PayloadError):
            kernels.laq_apply(last, codes, radius, 4)
    assert bool((last == 0).all())


def test_every_width_has_the_length_of_its_bits():
    grad = vector("normal", 1000, 1)
    for bits in BITS:
        packed, _ = kernels.laq_quantise(grad, torch.zeros(1000), bits)
        assert packed.numel() == 125 * bits
    for bits in (0, 9):
        with pytest.raises(ValueError, match="1 to 8"):
            kernels.laq_quantise(grad, torch.zeros(1000), bits)
