import pytest
import torch

from tests.laws.cohort import Cohort, same_state
from thinwire import ConfigError
from thinwire.methods import SignSGD

WIDE = {"wide": (40, 50)}


def votes(inputs: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return sum(one["wide"].sign() for one in inputs)


@pytest.mark.parametrize("size", [1, 3, 5, 8])
@pytest.mark.parametrize("reduce", ["gather", "twoshot"])
def test_majority_equals_the_sign_of_the_sum_of_signs(size: int, reduce) -> None:
    cohort = Cohort(SignSGD(scale=None, reduce=reduce), size, WIDE)
    inputs = cohort.inputs(0)
    out, sums = cohort.average(inputs)[0]["wide"], votes(inputs)
    assert torch.equal(out[sums != 0], sums[sums != 0].sign())
    assert (out.abs() == 1).all()


def test_the_result_is_as_long_as_the_gradients() -> None:
    cohort = Cohort("signsgd", 3, WIDE)
    inputs = cohort.inputs(1)
    out = cohort.average(inputs)[0]["wide"]
    assert torch.allclose(out.norm(), sum(one["wide"].norm() for one in inputs) / 3)


def test_the_magnitude_may_be_the_mean_of_the_ranks_mean_magnitudes() -> None:
    cohort = Cohort("signsgd(scale='mean')", 3, WIDE)
    inputs = cohort.inputs(1)
    out = cohort.average(inputs)[0]["wide"]
    expected = sum(one["wide"].abs().mean() for one in inputs) / 3
    assert torch.allclose(out.abs(), expected.expand_as(out))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_magnitudes_whose_squares_are_out_of_range(size: float) -> None:
    cohort = Cohort("signsgd", 2, WIDE)
    out = cohort.average([{"wide": torch.full((40, 50), size)}] * 2)[0]["wide"]
    assert torch.allclose(out, torch.full((40, 50), size))


@pytest.mark.parametrize("method", ["signsgd", "signsgd(scale='mean')", "signsgd(scale=None)"])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_gather_and_two_shots_give_the_same_bits(method: str, size: int) -> None:
    inside = method.removeprefix("signsgd").strip("()")
    ways = [f"signsgd({inside + ', ' if inside else ''}reduce={way!r})" for way in ("gather", "twoshot")]
    first, second = (Cohort(way, size) for way in ways)
    for step in range(2):
        inputs = first.inputs(step)
        assert same_state(first.average(inputs), second.average(inputs))


def test_one_bit_both_ways() -> None:
    n, size = 4096, 8
    for reduce, expected in (
        ("gather", n // 8 + 4),
        ("twoshot", n // 8 + 4 * size + n // 8 // size),
    ):
        cohort = Cohort(SignSGD(reduce=reduce), size, {"wide": (64, 64)})
        cohort.average(cohort.inputs(0))
        assert {meter.payload_bytes for meter in cohort.driver.meters} == {expected}


def test_ties_are_decided_by_lot() -> None:
    """Two ranks that disagree everywhere: half of the entries go either way, not all to +."""
    cohort = Cohort("signsgd", 2, WIDE)
    g = cohort.inputs(0)[0]["wide"]
    outs = [cohort.average([{"wide": g}, {"wide": -g}])[0]["wide"] for _ in range(4)]
    for out in outs:
        assert 0.4 < float((out > 0).float().mean()) < 0.6
    assert not torch.equal(outs[0].sign(), outs[1].sign())


def test_zeros_do_not_drift() -> None:
    """Weights without a gradient: their steps cancel in the long run."""
    cohort = Cohort("signsgd(scale=None)", 3, {"wide": (2, 8)})
    g = torch.zeros(2, 8)
    g[0] = 1
    total = sum(cohort.average([{"wide": g}] * 3)[0]["wide"] for _ in range(100))
    assert (total[0] == 100).all()
    assert total[1].abs().max() < 50


@pytest.mark.parametrize("method", ["signsgd", "signsgd(scale=None)", "signsgd(reduce='twoshot')"])
def test_a_rank_with_nothing_but_zeros_does_not_vote(method: str) -> None:
    cohort = Cohort(method, 2, WIDE)
    g = cohort.inputs(0)[0]["wide"]
    out = cohort.average([{"wide": torch.zeros_like(g)}, {"wide": g}])[0]["wide"]
    assert torch.equal(out.sign(), g.sign())


def test_wrong_scale() -> None:
    with pytest.raises(ConfigError, match="scale"):
        SignSGD(scale="max")
