import pytest
import torch
from kernel_inputs import reference, same, torch_threads, vector

from thinwire import kernels
from thinwire.kernels import Chunks

# Chunks of 64 x 64 (whole, and padded at one or both edges), and others.
SHAPES = [
    (64, 64),
    (128, 192),
    (127, 127),
    (64, 5000),
    (24, 37),
    (65, 64),
    (100, 127),
    (8, 3, 3, 3),
    (301,),
    (1,),
    (),
    (0,),
    (3, 0),
]


def coefficients(x, chunks):
    out = torch.empty(chunks.total)
    kernels.dct(x, chunks, out)
    return out


def matrix(y, chunks):
    out = torch.empty(chunks.rows * chunks.cols)
    kernels.inverse_dct(y.clone(), chunks, out)
    return out


def cosines(n):
    """DCT-II as it is defined, in double precision."""
    j = torch.arange(n, dtype=torch.float64)
    made = torch.cos(torch.pi / n * (j + 0.5) * j[:, None])
    return made / made.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_chunk_is_transformed_on_both_sides(shape):
    chunks = Chunks.of(shape)
    x = vector("normal", chunks.rows * chunks.cols, 1)
    y = coefficients(x, chunks)
    h, w = chunks.height, chunks.width
    down, across = -(-chunks.rows // h), -(-chunks.cols // w)
    padded = torch.zeros(down * h, across * w, dtype=torch.float64)
    padded[: chunks.rows, : chunks.cols] = x.view(chunks.rows, chunks.cols)
    for number, got in enumerate(y.double().view(-1, h, w) if y.numel() else ()):
        top, left = number // across * h, number % across * w
        expected = cosines(h) @ padded[top : top + h, left : left + w] @ cosines(w).T
        assert torch.allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "shifted", "zeros", "denormal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_keeps_lengths_and_is_undone(shape, kind):
    chunks = Chunks.of(shape)
    x = vector(kind, chunks.rows * chunks.cols, 2)
    y = coefficients(x, chunks)
    torch.testing.assert_close(y.double().norm(), x.double().norm(), rtol=1e-6, atol=1e-40)
    if x.numel():  # numbers below 1e-38 have few bits
        assert (matrix(y, chunks) - x).abs().max() <= 3e-6 * x.abs().max() + 1e-41


@pytest.mark.parametrize("shape", SHAPES)
def test_backends_agree_within_rounding(shape):
    chunks = Chunks.of(shape)
    x = vector("normal", chunks.rows * chunks.cols, 3)
    y = reference(lambda: coefficients(x, chunks))
    assert torch.allclose(coefficients(x, chunks), y, atol=5e-6)
    assert torch.allclose(matrix(y, chunks), reference(lambda: matrix(y, chunks)), atol=5e-6)


@pytest.mark.parametrize(
    ("length", "side"),
    [(768, 64), (50_257, 64), (96, 48), (65, 33), (64, 64), (37, 37), (1, 1), (127, 64), (100, 50)],
)
def test_sides_are_cut_into_equal_pieces(length, side):
    chunks = Chunks.of((length, length))
    assert (chunks.height, chunks.width) == (side, side)
    pieces = -(-length // side)
    assert 0 <= pieces * side - length < pieces
    assert chunks.total == (pieces * side) ** 2


def test_threads_give_the_same():
    chunks = Chunks.of((2000, 64 * 20 + 63))
    assert chunks.size == 63 * 64
    chunks = Chunks.of((64 * 40, 64 * 20 - 1))
    assert chunks.size == 4096
    x = vector("normal", chunks.rows * chunks.cols, 1)
    with torch_threads(1):
        y = coefficients(x, chunks)
        alone = matrix(y, chunks)
    with torch_threads(3):
        same(coefficients(x, chunks), y)
        same(matrix(y, chunks), alone)


def test_what_is_not_finite_fills_its_chunk():
    chunks = Chunks.of((64, 128))
    for bad in (torch.nan, torch.inf):
        x = vector("normal", 64 * 128, 1)
        x[5] = bad
        y = coefficients(x, chunks)
        assert not y[:4096].isfinite().any()
        assert y[4096:].isfinite().all()


def test_wrong_lengths_are_refused():
    chunks = Chunks.of((10, 10))
    with pytest.raises(ValueError, match="100 numbers, not 99"):
        kernels.dct(torch.zeros(99), chunks, torch.zeros(100))
    with pytest.raises(ValueError, match="100 numbers, not 101"):
        kernels.inverse_dct(torch.zeros(101), chunks, torch.zeros(100))
    with pytest.raises(TypeError, match="float32"):
        kernels.dct(torch.zeros(100).half(), chunks, torch.zeros(100))
