"""Random rules without feedback: scaled by n/k, or sent as they are."""

import pytest
import torch

from tests.laws.cohort import Cohort, total
from thinwire import ConfigError, parse

SHAPES = {"wide": (24, 37)}
N = 24 * 37
PLAIN = (
    "randomblock(ratio={ratio}, feedback=False{scale})",
    "randomk(ratio={ratio}, feedback=False{scale})",
    "randomk(ratio={ratio}, shared=False, feedback=False, reduce='gather'{scale})",
)


def both(template: str, ratio: float) -> tuple[str, str]:
    return template.format(ratio=ratio, scale=", scale=None"), template.format(ratio=ratio, scale="")


@pytest.mark.parametrize("template", PLAIN)
@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_what_is_sent_differs_by_n_over_k_and_nothing_else(template: str, ratio: float) -> None:
    plain, scaled = (Cohort(method, 3, SHAPES) for method in both(template, ratio))
    factor = N / int(ratio * N)
    for step in range(4):
        inputs = plain.inputs(step)
        own, theirs = (cohort.average(inputs)[0]["wide"] for cohort in (plain, scaled))
        torch.testing.assert_close(own * factor, theirs, rtol=1e-5, atol=1e-5)
    assert not plain.sessions[0].residuals() or all(
        not owed.any() for owed in plain.sessions[0].residuals().values()
    )
    assert plain.driver.meters[0].payload_bytes == scaled.driver.meters[0].payload_bytes


@pytest.mark.parametrize("template", PLAIN[:2])
def test_shared_entries_are_the_exact_mean_and_others_are_zero(template: str) -> None:
    cohort = Cohort(both(template, 0.2)[0], 3, SHAPES)
    for step in range(3):
        inputs = cohort.inputs(step)
        out = cohort.average(inputs)[0]["wide"].double()
        sent = out != 0
        assert int(sent.sum()) == int(0.2 * N)
        torch.testing.assert_close(out[sent], total(inputs)["wide"][sent] / 3, rtol=0, atol=1e-6)


@pytest.mark.parametrize("template", PLAIN)
def test_traits_say_which_is_unbiased(template: str) -> None:
    plain, scaled = (parse(method).traits for method in both(template, 0.1))
    assert scaled.unbiased
    assert not plain.unbiased
    assert not plain.conserves


@pytest.mark.parametrize("template", PLAIN)
def test_momentum_diverges_with_the_scale_and_converges_without(template: str) -> None:
    """Noisy least squares with momentum 0.9, at a rate that suits dense SGD: each step of the scaled rule is
    1/ratio times too long for some coordinates, and momentum multiplies it by up to ten."""
    ends = []
    for method in both(template, 0.02):
        cohort = Cohort(method, 3, SHAPES)
        w = torch.full(SHAPES["wide"], 2.0)
        velocity = torch.zeros_like(w)
        noise = torch.Generator().manual_seed(1)
        for _ in range(600):
            inputs = [{"wide": w + 0.1 * torch.randn(w.shape, generator=noise)} for _ in range(3)]
            velocity = 0.9 * velocity + cohort.average(inputs)[0]["wide"]
            w = w - 0.1 * velocity
            if not w.isfinite().all() or w.abs().max() > 1e6:
                break
        ends.append(float(w.square().mean()))
    plain, scaled = ends
    assert plain < 0.5
    assert scaled > 100


@pytest.mark.parametrize("name", ["randomblock", "randomk"])
def test_scale_is_checked(name: str) -> None:
    with pytest.raises(ConfigError, match="scale is for feedback=False; with feedback nothing is scaled"):
        parse(f"{name}(scale=None)")
    with pytest.raises(ConfigError, match="scale must be one of 'unbiased', None"):
        parse(f"{name}(feedback=False, scale='none')")
