import pytest
import torch

from tests.laws.cohort import Cohort
from thinwire import ConfigError
from thinwire.methods import TernGrad


def heavy(n: int = 3000) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0)) ** 3


def decoded(method: TernGrad, g: torch.Tensor, seed: int) -> torch.Tensor:
    return method.decode([method.encode(g, seed)], g.numel())


@pytest.mark.parametrize("clip", [1.0, 2.5, None])
def test_unbiased_with_respect_to_the_clipped_gradient(clip) -> None:
    g, trials = heavy(), 300
    bound = g.abs().max() if clip is None else clip * g.std(unbiased=False)
    runs = torch.stack([decoded(TernGrad(clip=clip), g, seed) for seed in range(trials)])
    clipped = g.clamp(-bound, bound)
    # Each entry is +-s with probability |g|/s: its variance is known.
    deviation = (clipped.abs() * (bound - clipped.abs())).clamp(min=0).sqrt() / trials**0.5
    assert ((runs.mean(0) - clipped).abs() < 6 * deviation + 8 * bound / trials).all()
    assert abs(float((runs.mean(0) - clipped).sum() / deviation.square().sum().sqrt())) < 5


def test_three_values_and_one_scale() -> None:
    g = heavy()
    values = decoded(TernGrad(), g, 1).unique()
    scale = 2.5 * g.std(unbiased=False)
    assert torch.allclose(values, torch.tensor([-1.0, 0.0, 1.0]) * scale)


def test_signs_are_kept_and_zeros_stay() -> None:
    g = heavy()
    g[::3] = 0
    q = decoded(TernGrad(clip=None), g, 2)
    assert (q * g >= 0).all()
    assert (q[::3] == 0).all()


def test_two_bits_an_entry() -> None:
    cohort = Cohort("terngrad", 4, {"wide": (64, 64)})
    cohort.average(cohort.inputs(0))
    assert cohort.driver.meters[0].payload_bytes == 64 * 64 // 4 + 4


def test_clipping_is_told_by_the_traits() -> None:
    assert TernGrad(clip=None).traits.unbiased
    assert not TernGrad(clip=2.5).traits.unbiased


@pytest.mark.parametrize("clip", [0, -1.0, float("inf"), float("nan"), True, "2.5"])
def test_wrong_clip(clip) -> None:
    with pytest.raises(ConfigError, match="clip"):
        TernGrad(clip=clip)
