"""Vectors that kernels get wrong, and a way to run the same call on both backends."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels import use_reference

T = TypeVar("T")

# Triton's interpreter (see interpreted.py) is a thousand times slower: smaller inputs, and fewer.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZES = (0, 1, 7, 65, 1100) if INTERPRETED else (0, 1, 7, 64, 65, 1000, 100_003)
KINDS = (
    "normal",
    "heavy",
    "zeros",
    "ties",
    "constant",
    "denormal",
    "infinite",
    "nan",
    "sparse",
    "shifted",
    "huge",
)
FINITE_KINDS = tuple(kind for kind in KINDS if kind not in ("infinite", "nan"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

quick = settings(max_examples=3 if INTERPRETED else 25, deadline=None, derandomize=True)


def vector(kind: str, n: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g)
    if kind == "heavy":
        x = x / (torch.rand(n, generator=g) + 1e-4) ** 2
    elif kind == "zeros":
        x = x * 0.0
    elif kind == "ties":
        x = (x * 2).round() / 2
    elif kind == "constant":
        x = torch.full((n,), -0.3)
    elif kind == "denormal":
        x = x * 1e-40
    elif kind == "sparse":
        x = x * (torch.rand(n, generator=g) < 0.02)
    elif kind == "shifted":
        x = x * 0.1 + 5.0
    elif kind == "huge":
        x = (x * 1e38).clamp(-3e38, 3e38)
    elif kind in ("infinite", "nan") and n:
        bad = torch.inf if kind == "infinite" else torch.nan
        x[torch.randint(n, (1 + n // 500,), generator=g)] = bad
        x[torch.randint(n, (1,), generator=g)] = -torch.inf if n > 1 else bad
    return x


def vectors(kinds: tuple[str, ...] = KINDS, sizes: tuple[int, ...] = SIZES) -> st.SearchStrategy[Tensor]:
    return st.builds(vector, st.sampled_from(kinds), st.sampled_from(sizes), st.integers(0, 50))


def counts_for(n: int, choice: int) -> int:
    """A k for a vector of n entries: none, one, a few percent, most, all, more than there are."""
    return [0, 1, max(n // 1000, 1), max(n // 20, 1), n // 2, n, n + 5][choice]


choices = st.integers(0, 6)


def reference(call: Callable[[], T]) -> T:
    with use_reference():
        return call()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same(a: object, b: object) -> None:
    """Equal bits, except that all NaN count as one."""
    if isinstance(a, tuple):
        assert isinstance(b, tuple)
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            same(left, right)
    elif isinstance(a, Tensor):
        assert isinstance(b, Tensor)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        if a.is_floating_point():
            assert torch.equal(torch.signbit(a) & ~a.isnan(), torch.signbit(b) & ~b.isnan()), "signs of zeros"
    else:
        assert a == b or (a != a and b != b)  # noqa: PLR0124 - NaN
