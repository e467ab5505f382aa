"""Decoders of hostile parts, without the frames that check lengths first: only a PayloadError comes out.

What has a non-finite float in it is refused, or decoded as something non-finite, which aborts the step.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz_payloads import fuzz
from thinwire import PayloadError, parse
from thinwire.methods.families import indices, sampled
from thinwire.methods.families.feedback import Entries
from thinwire.methods.families.lazy import Coder
from thinwire.methods.families.quantised import Quantised
from thinwire.methods.families.sparse import Sparse

CODES = [
    "qsgd(bits=4)",
    "qsgd(bits=1, bucket=16)",
    "qsgd(bits=8, bucket=7, norm='l2')",
    "terngrad",
    "natural",
    "onebit",
    "efsign",
]
SPARSE = ["topk", "gaussiank", "threshold(value=0.5)"] + [f"topk(values={code})" for code in CODES]
Parts = list[torch.Tensor]


@st.composite
def hostile(draw: st.DrawFn, parts: Parts) -> Parts:
    """Shorter, longer, with other bytes, with a number that is not finite, or as they were."""
    found = []
    for part in parts:
        numel = part.numel()
        length = draw(
            st.sampled_from([numel, numel, numel, 0, 1, max(0, numel - 1), numel + 1, 2 * numel + 3])
        )
        made = part.new_zeros(length)
        made[: min(length, numel)] = part[:length]
        raw = made.view(torch.uint8)
        for place, value in draw(
            st.dictionaries(st.integers(0, 400), st.integers(0, 255), max_size=4)
        ).items():
            if raw.numel():
                raw[place % raw.numel()] = value
        if draw(st.booleans()) and draw(st.booleans()):
            raw.fill_(draw(st.sampled_from([0, 127, 128, 255])))
        if made.is_floating_point() and length and draw(st.booleans()):
            made[draw(st.integers(0, length - 1))] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
        found.append(made)
    return found


def values(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def chosen(n: int, k: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(k))[:k].sort()[0].int()


def all_finite(parts: Parts) -> bool:
    return all(bool(part.isfinite().all()) for part in parts)


sizes = st.sampled_from([1, 5, 8, 40, 137])


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([*CODES, "signsgd(rotate=True)"]), sizes)
def test_codes(data: st.DataObject, text: str, n: int) -> None:
    codec = parse(text)
    assert isinstance(codec, Quantised)
    parts = data.draw(hostile(codec.encode(values(n), 3)))
    try:
        decoded = codec.decode([parts], n)
        finite = bool(codec.finite([parts]))
    except PayloadError:
        return
    assert decoded.numel() == n
    assert finite or decoded.isnan().all()
    assert finite == all_finite(parts) or text == "natural"


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(SPARSE), sizes, st.floats(0, 1))
def test_sparse_entries(data: st.DataObject, text: str, n: int, share: float) -> None:
    method, where = parse(text), chosen(n, int(share * n))
    assert isinstance(method, Sparse)
    entries = Entries(where, values(n)[where.long()])
    honest = method._encode(entries, n, 3)[0]
    parts = data.draw(hostile(honest))
    try:
        own, decoded = method._decode([honest, parts], n, 0, entries)
    except PayloadError:
        return
    assert torch.equal(own.indices, entries.indices)
    assert decoded.indices.numel() == decoded.values.numel()
    assert all_finite(parts) or not decoded.values.isfinite().all()


@pytest.mark.parametrize("text", [text for text in CODES if parse(text).code_bytes(0)])
def test_a_scale_without_entries_is_refused_if_it_is_not_finite(text: str) -> None:
    """No entry has the number, and so no finite-check would see it; no honest rank sends it."""
    method = parse(f"gaussiank(values={text})")
    nothing = Entries(chosen(40, 0), values(40)[:0])
    honest = method._encode(nothing, 40, 3)[0]
    assert method._decode([honest, honest], 40, 0, nothing)[1].values.numel() == 0
    parts = [part.clone() for part in honest]
    method.values.spoil(parts[2:], torch.tensor(True))
    with pytest.raises(PayloadError, match="no entries"):
        method._decode([honest, parts], 40, 0, nothing)


@settings(max_examples=200, deadline=None)
@given(st.data(), sizes, st.floats(0, 1), st.floats(0, 1))
def test_sampled_entries(data: st.DataObject, n: int, sure: float, drawn: float) -> None:
    where = chosen(n, int(sure * n))
    sample = sampled.Sample(where, values(n)[where.long()], chosen(n, int(drawn * n)), 0.5)
    honest = sampled.encode(n, sample)
    assert honest.numel() <= sampled.longest(n)
    (code,) = data.draw(hostile([honest]))
    try:
        entries = sampled.decode(code, n)
    except PayloadError:
        return
    assert all(each.indices.numel() == each.values.numel() for each in entries)
    bad = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    where = data.draw(st.sampled_from(["values"] * bool(sample.values.numel()) + ["magnitude"]))
    spoiled = sample._replace(**{where: bad if where == "magnitude" else sample.values.clone().fill_(bad)})
    sure, signs = sampled.decode(sampled.encode(n, spoiled), n)
    assert not (sure if where == "values" else signs).values.isfinite().any()


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 4, 8, 32, 64]), sizes)
def test_uploads(data: st.DataObject, bits: int, n: int) -> None:
    coder = Coder(bits, (n // 2, n - n // 2))
    honest = coder.encode(values(n), torch.zeros(n, dtype=torch.float64)).parts
    parts = data.draw(hostile(honest))
    try:
        decoded = coder.decode(parts, n)
    except PayloadError:
        return
    assert decoded.numel() == n
    assert n == 1 or all_finite(parts) or not decoded.isfinite().all()  # a tensor without entries has no use


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([2, 20, 300]), sizes)
def test_chunks(data: st.DataObject, chunk: int, n: int) -> None:
    code = indices.ChunkCode(n, chunk)
    (given_code,) = data.draw(hostile([torch.zeros(code.bytes, dtype=torch.uint8)]))
    try:
        found = code.decode(given_code)
    except PayloadError:
        return
    assert found.numel() == code.k
    assert 0 <= int(found.min()) <= int(found.max()) < n


def test_forged_frames_of_every_method() -> None:
    """The seeded beginning of `python -m tests.fuzz_payloads`."""
    outcomes = fuzz(2000, seed=0)
    assert outcomes["forged"] >= 2000
    assert outcomes["refused"] > 300
    assert outcomes["damaged"] > 150
