"""The families that `torch.compile` makes for GPUs: their steps equal the reference, and are one graph.

Traced here with the backend THINWIRE_COMPILER: "eager" makes no code, "inductor" does, for the CPU.
"""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import DTYPES, KINDS, quick, same, vector
from torch import Tensor

from thinwire.kernels.triton import _compiled

COMPILER = os.environ.get("THINWIRE_COMPILER", "eager")
SEED = 2**63 + 1
SIZES = (0, 1, 7, 65, 1000)


@pytest.fixture(scope="module", autouse=True)
def compiler():
    before = dict(_compiled.SETTINGS)
    if COMPILER != "inductor":
        _compiled.SETTINGS.clear()
        _compiled.SETTINGS["backend"] = COMPILER
    yield
    _compiled.SETTINGS.clear()
    _compiled.SETTINGS.update(before)


def both(family, name, *arguments):
    """The result of the reference, after comparing: results and what was written into the arguments."""
    ours, theirs = ([x.clone() if isinstance(x, Tensor) else x for x in arguments] for _ in range(2))
    got = getattr(import_module(f"thinwire.kernels.triton.{family}"), name)(*ours)
    expected = getattr(import_module(f"thinwire.kernels.reference.{family}"), name)(*theirs)
    same(got, expected)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, Tensor):
            same(mine, other)
    return expected


def quantised(x, last, out, bits=4):
    n = x.numel()
    for norm in ("l2", "max"):
        packed, scales = both("quantisation", "quantise", x, bits, 64, norm, SEED)
    both("quantisation", "dequantise_mean", [packed] * 3, [scales, 2 * scales, 3 * scales], bits, 64, n, out)
    both("quantisation", "dequantise_mean", [packed], [scales], bits, 64, n, out)


def ternary(x, last, out):
    for clip in (None, 2.5):
        both("ternary", "ternary_quantise", x, clip, SEED)


def signs(x, last, out):
    n = x.numel()
    both("sign", "sign_pack", x)
    both("sign", "sign_pack_mean", x)
    both("sign", "sign_scales", x, 64)
    both("sign", "onebit_pack", x)
    packed, means = both("sign", "sign_pack_means", x, 64)
    pairs = [torch.tensor(pair) for pair in ((0.1, -0.1), (0.2, 0.3), (-0.0, 0.0))]
    both("sign", "onebit_mean", [packed] * 3, pairs, n, out)
    both("sign", "sign_means", [packed] * 3, [means, 2 * means, means], 64, n, out)
    both("sign", "sign_majority", [packed, packed], n)


def natural(x, last, out):
    packed = both("natural", "natural_quantise", x, SEED)
    both("natural", "natural_mean", [packed] * 3, x.numel(), out)
    both("natural", "natural_mean", [packed], x.numel(), out)


def laq(x, last, out, bits=4):
    both("laq", "laq_quantise", x, last, bits, True)
    packed, radius = both("laq", "laq_quantise", x, last, bits, False)
    if radius == radius:  # noqa: PLR0124 - not NaN, which is never applied
        both("laq", "laq_apply", last, packed, radius, bits)
        both("laq", "laq_norms", x, last, packed, radius, bits)


def means(x, last, out):
    both("a2sgd", "two_means", x)
    both("a2sgd", "a2sgd_apply", x, torch.tensor([0.25, -1.5]), out)
    both("finite", "all_finite", x)


def argmax(x, last, out):
    both("scalecom", "chunk_argmax", x, None, 7)
    both("scalecom", "chunk_argmax", last, x, 7)


FAMILIES = (quantised, ternary, signs, natural, laq, means, argmax)


@quick
@given(
    st.sampled_from(FAMILIES),
    st.sampled_from(KINDS),
    st.sampled_from(SIZES),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
def test_the_steps_equal_the_reference(family, kind, n, dtype, seed):
    with torch.compiler.set_stance("force_eager"):
        family(vector(kind, n, seed).to(dtype), vector("normal", n, seed + 1), torch.empty(n).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_vector_and_every_width(kind):
    x, last, out = vector(kind, 65, 1), vector("normal", 65, 2), torch.empty(65)
    with torch.compiler.set_stance("force_eager"):
        for family in FAMILIES:
            family(x, last, out)
        for bits in (1, 2, 8):
            quantised(x, last, out, bits)
        for bits in (1, 3, 8):
            laq(x, last, out, bits)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_steps_are_one_graph(family):
    """`fullgraph` refuses whatever the host would have to read from the device."""
    x, last = vector("normal", 200, 1), vector("normal", 200, 2)
    family(x, last, torch.empty(200))


@pytest.mark.slow
def test_compiled_code_has_the_bits_of_the_reference():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "one_graph", "--timeout", "1700"]
    environment = {**os.environ, "THINWIRE_COMPILER": "inductor"}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-5000:]
