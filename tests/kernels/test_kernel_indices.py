"""Index codes: what goes in comes out, both implementations write the same bytes, noise is refused."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import PayloadError
from thinwire.kernels import use_reference
from thinwire.kernels.indices import bitmap, from_bitmap, from_elias_fano, from_rice, rice
from thinwire.methods.families import indices as codes


@st.composite
def index_lists(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    n = draw(st.sampled_from([0, 1, 7, 64, 65, 1000, 100_003, 2**31 - 1]))
    k = draw(st.integers(0, min(n, 300)))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    drawn = torch.randint(max(n, 1), (k,), generator=rng).unique().to(torch.int32)
    return drawn, n


@given(index_lists())
def test_round_trip_and_equal_bytes(given_list: tuple[torch.Tensor, int]) -> None:
    indices, n = given_list
    if codes.best_way(n, indices.numel()) == "bitmap" and n > 10**6:
        return
    code = codes.encode(indices, n)
    assert code.numel() == codes.code_bytes(n, indices.numel())
    assert torch.equal(codes.decode(code, n, indices.numel()), indices)
    with use_reference():
        assert torch.equal(codes.encode(indices, n), code)
        assert torch.equal(codes.decode(code, n, indices.numel()), indices)


@pytest.mark.parametrize("n", [1, 10, 4096, 100_003])
def test_every_density(n: int) -> None:
    for k in sorted({1, 2, n // 1000, n // 100, n // 8, n // 2, n - 1, n}):
        if not 0 < k <= n:
            continue
        indices = (
            torch.randperm(n, generator=torch.Generator().manual_seed(k))[:k].sort().values.to(torch.int32)
        )
        assert torch.equal(codes.decode(codes.encode(indices, n), n, k), indices)
        assert codes.code_bytes(n, k) <= 4 * k


def test_one_percent_costs_less_than_nine_bits_an_index() -> None:
    assert codes.code_bytes(10_000_000, 100_000) * 8 / 100_000 < 9
    assert codes.code_bytes(10_000_000, 10_000) * 8 / 10_000 < 12


@given(st.binary(max_size=80), st.integers(0, 500), st.integers(0, 500), st.booleans())
def test_noise_is_refused_or_in_range(noise: bytes, n: int, k: int, reference: bool) -> None:
    if k <= n:
        noise = (noise * 100)[: codes.code_bytes(n, k)] if noise else noise
    code = torch.tensor(list(noise), dtype=torch.uint8)
    try:
        if reference:
            with use_reference():
                found = codes.decode(code, n, k)
        else:
            found = codes.decode(code, n, k)
    except PayloadError:
        return
    if codes.best_way(n, k) != "raw":
        assert found.numel() == k
        assert not k or (int(found.min()) >= 0 and int(found.max()) < n)
        assert bool((found[1:] > found[:-1]).all())


@given(index_lists(), st.booleans(), st.integers(0, 3))
def test_rice_round_trip_and_equal_bytes(
    given_list: tuple[torch.Tensor, int], signed: bool, fewer: int
) -> None:
    indices, n = given_list
    low = max(0, codes.rice_bits(n, indices.numel()) - fewer)
    if n >> low > 10**6:
        return
    marked = indices.clone()
    if signed:
        marked[::3] |= -(2**31)
    code = rice(marked, n, low, signed)
    assert torch.equal(from_rice(code, n, marked.numel(), low, signed), marked)
    with use_reference():
        assert torch.equal(rice(marked, n, low, signed), code)
        assert torch.equal(from_rice(code, n, marked.numel(), low, signed), marked)
    longest = (marked.numel() * (low + signed) + 7) // 8 + (marked.numel() + (n >> low) + 7) // 8
    assert code.numel() <= longest


@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 100), st.integers(0, 30), st.booleans())
def test_rice_noise_is_refused_by_both_or_in_range(
    noise: bytes, n: int, k: int, low: int, signed: bool
) -> None:
    code = torch.tensor(list(noise), dtype=torch.uint8)
    try:
        found = from_rice(code, n, k, low, signed)
    except PayloadError:
        with use_reference(), pytest.raises(PayloadError):
            from_rice(code, n, k, low, signed)
        return
    with use_reference():
        assert torch.equal(from_rice(code, n, k, low, signed), found)
    found = found & (2**31 - 1)
    assert found.numel() == k
    assert not k or int(found[-1]) < n
    assert bool((found[1:] > found[:-1]).all())


@pytest.mark.parametrize("reference", [False, True])
def test_an_index_that_needs_32_bits_is_refused(reference: bool) -> None:
    """2 << 30 in an int32 would be negative, and below any n."""
    code = torch.tensor([0, 0, 0, 0, 0b100], dtype=torch.uint8)
    with use_reference() if reference else nullcontext(), pytest.raises(PayloadError):
        from_elias_fano(code, 2**31 - 1, 1, 30)


@pytest.mark.parametrize("n", [1, 64, 1001])
def test_a_bitmap_comes_back(n: int) -> None:
    indices = torch.arange(0, n, 3, dtype=torch.int32)
    code = bitmap(indices, n)
    assert torch.equal(from_bitmap(code, n, indices.numel()), indices)
    with use_reference():
        assert torch.equal(bitmap(indices, n), code)
    with pytest.raises(PayloadError):
        from_bitmap(code, n, indices.numel() + 1)
