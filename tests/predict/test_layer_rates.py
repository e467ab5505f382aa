"""ScaleCom's rates by layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.laws.cohort import Cohort
from thinwire import ConfigError
from thinwire.methods import Dense, ScaleCom
from thinwire.predict.layer_rates import beta_for, multiply_adds_per_entry, scalecom_by_layer


def network() -> nn.Sequential:
    """Outputs of 16 x 16, 14 x 14, 12 x 12 and 4 x 4 positions, then two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.Conv2d(4, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3),
        nn.Conv2d(8, 8, 3, stride=3),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.Linear(64, 10),
    )


def test_a_convolution_has_one_multiply_add_per_position_and_entry() -> None:
    model = network()
    mean = model[2].running_mean.clone()
    found = multiply_adds_per_entry(model, torch.randn(5, 1, 16, 16))
    assert found == {
        "0.weight": 256,
        "1.weight": 196,
        "3.weight": 144,
        "4.weight": 16,
        "6.weight": 1,
        "7.weight": 1,
    }
    assert torch.equal(model[2].running_mean, mean)
    assert model.training


def test_rates_follow_the_arithmetic_and_the_ends_stay_dense() -> None:
    model = network()
    method = scalecom_by_layer(model, torch.randn(5, 1, 16, 16), beta=0.5)
    rules = dict(method.rules)
    assert rules["0.weight"] == rules["7.weight"] == Dense()
    rates = {"1.weight": 25, "3.weight": 50, "4.weight": 400, "6.weight": 400}
    for name, rate in rates.items():
        assert rules[name] == ScaleCom(ratio=1 / rate, beta=0.5)
    whole = scalecom_by_layer(model, torch.randn(5, 1, 16, 16), ends="compressed")
    assert dict(whole.rules)["0.weight"] == ScaleCom(ratio=1 / 25)


def test_it_trains_with_64_learners() -> None:
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 50), nn.Linear(50, 5))
    method = scalecom_by_layer(model, torch.randn(2, 40))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    cohort = Cohort(method, 64, shapes)
    rng = torch.Generator().manual_seed(0)
    gradients = [
        {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()} for _ in range(64)
    ]
    results = cohort.average(gradients)
    middle = torch.stack([each["1.weight"] for each in gradients]).mean(0)
    sent = results[0]["1.weight"]
    assert int((sent != 0).sum()) == 3000 // 400
    assert torch.allclose(sent[sent != 0], middle[sent != 0], atol=1e-5)
    assert all(torch.equal(each["1.weight"], sent) for each in results)


def test_beta_falls_with_the_batch_down_to_the_papers() -> None:
    assert [beta_for(batch, 256) for batch in (128, 256, 512, 2560, 100_000)] == [1.0, 1.0, 0.5, 0.1, 0.1]


def test_a_model_without_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="no weight"):
        scalecom_by_layer(nn.BatchNorm1d(3), torch.randn(4, 3))
