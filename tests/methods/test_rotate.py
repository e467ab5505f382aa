"""Rotation before coding: unbiased, as exact as DRIVE says, and no worse for a few large entries."""

import itertools
import math

import pytest
import torch

from tests.laws.cohort import LINKS, Cohort
from thinwire import ConfigError, parse
from thinwire.core import Layout, Link
from thinwire.kernels import block_of
from thinwire.net.link import slowest_link


def estimates(method: str, inputs: list[torch.Tensor], trials: int, seed: int = 0) -> torch.Tensor:
    """The results of many steps, which draw new rotations, with the same gradients."""
    cohort = Cohort(method, len(inputs), {"wide": tuple(inputs[0].shape)}, seed=seed)
    given = [{"wide": x} for x in inputs]
    return torch.stack([cohort.average(given)[0]["wide"].flatten().double() for _ in range(trials)])


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The mean squared error by the squared length of the truth."""
    truth = truth.flatten().double()
    return float((found - truth).square().sum(1).mean() / truth.square().sum())


def drawn(kind: str, shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=rng)
    if kind == "heavy":
        x = x**5
    elif kind == "spiky":
        x = 0.01 * x
        x.view(-1)[::700] = 1.0
    return x


@pytest.mark.parametrize("kind", ["normal", "heavy", "spiky"])
@pytest.mark.parametrize("shape", [(64, 64), (90, 100)])
def test_one_bit_has_the_error_of_drive_whatever_the_gradient(kind: str, shape: tuple[int, int]) -> None:
    """pi/2 - 1 of the squared length for one sender: Theorem 1 of the paper, for many dimensions."""
    x = drawn(kind, shape)
    assert error(estimates("signsgd(rotate=True)", [x], 60), x) == pytest.approx(math.pi / 2 - 1, rel=0.05)


def test_the_error_of_the_mean_falls_with_the_number_of_ranks() -> None:
    x = drawn("heavy", (64, 64))
    inputs = [x + drawn("normal", (64, 64), seed) * x.abs().mean() for seed in range(4)]
    truth = torch.stack(inputs).mean(0)
    found = error(estimates("signsgd(rotate=True, reduce='gather')", inputs, 40), truth)
    alone = sum(float(one.square().sum()) for one in inputs) * (math.pi / 2 - 1)
    assert found <= 1.1 * alone / 4 / float(truth.square().sum())


@pytest.mark.parametrize("reduce", ["gather", "twoshot"])
@pytest.mark.parametrize("code", ["signsgd(", "qsgd(bits=2, "])
def test_two_large_entries_are_not_swallowed(code: str, reduce: str) -> None:
    """With one round of signs and a Hadamard matrix, the smaller of two entries would vanish."""
    x = torch.zeros(64, 64)
    x[3, 5], x[40, 7] = 1.0, 0.6
    other = torch.zeros(64, 64)
    other[3, 5], other[9, 9] = 0.5, 0.7
    found = estimates(f"{code}rotate=True, reduce={reduce!r})", [x, other], 300)
    truth = ((x + other) / 2).flatten().double()
    spread = found.std(0) / math.sqrt(len(found))
    assert (found.mean(0) - truth).abs().max() < float(0.01 + 5 * spread.max())
    for where in ((3, 5), (40, 7), (9, 9)):
        place = where[0] * 64 + where[1]
        assert abs(found[:, place].mean() - truth[place]) < 0.01 + 4 * spread[place]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_few_bits_lose_less_than_half_of_what_they_would_of_a_spiky_gradient(bits: int) -> None:
    x = drawn("spiky", (90, 100))
    plain = error(estimates(f"qsgd(bits={bits})", [x], 20), x)
    turned = error(estimates(f"qsgd(bits={bits}, rotate=True)", [x], 20), x)
    assert turned < 0.5 * plain


def test_the_rotation_changes_with_step_and_seed_and_is_the_same_on_all_ranks() -> None:
    x = drawn("normal", (40, 50))
    first, second = estimates("signsgd(rotate=True)", [x, x, x], 2)
    (other,) = estimates("signsgd(rotate=True)", [x, x, x], 1, seed=5)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    # Ranks that share the rotation and the gradient have the same code: their mean is no better than one.
    assert error(first[None], x) == pytest.approx(math.pi / 2 - 1, rel=0.1)


@pytest.mark.parametrize("n", [2000, 4096, 5000, 100_003])
def test_the_payload_has_no_padding(n: int) -> None:
    layout = Layout.of([("w", (n,))])
    plain, turned = parse("qsgd(bits=4)"), parse("qsgd(bits=4, rotate=True)")
    for size, text in itertools.product((2, 8), LINKS):
        link = slowest_link(text)
        assert plain.payload_bytes(layout, size, link) == turned.payload_bytes(layout, size, link)
    blocks = -(-n // block_of(n))
    assert parse("signsgd(rotate=True)").payload_bytes(layout, 2, Link()) == -(-n // 8) + 4 * blocks
    assert blocks == -(-n // 4096) or n < 4096


def test_half_precision_is_rotated_in_single() -> None:
    x = drawn("normal", (64, 64)).bfloat16()
    cohort = Cohort("qsgd(bits=8, rotate=True)", 2, {"wide": (64, 64)}, dtype=torch.bfloat16)
    out = cohort.average([{"wide": x}, {"wide": x}])[0]["wide"]
    assert out.dtype == torch.bfloat16
    assert (out.float() - x.float()).norm() < 0.02 * x.float().norm()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="scale is for votes"):
        parse("signsgd(rotate=True, scale='mean')")
    with pytest.raises(ConfigError, match="cannot be rotated"):
        parse("topk(values=qsgd(rotate=True))")
    with pytest.raises(ConfigError, match="rotate must be True or False"):
        parse("qsgd(rotate=1)")
