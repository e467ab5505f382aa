"""ScaleCom's rates by layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.laws.cohort import Cohort, same_state
from thinwire import ConfigError, parse
from thinwire.methods import Dense, ScaleCom
from thinwire.predict.layer_rates import beta_for, multiply_adds_per_entry, scalecom_by_layer
from thinwire.tools.workloads.models import CharTransformer, LstmLanguageModel


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


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_either_end_may_be_compressed(first: bool, last: bool) -> None:
    images = torch.randn(5, 1, 16, 16)
    rules = dict(scalecom_by_layer(network(), images, dense_first=first, dense_last=last).rules)
    assert rules["0.weight"] == (Dense() if first else ScaleCom(ratio=1 / 25))
    assert rules["7.weight"] == (Dense() if last else ScaleCom(ratio=1 / 400))
    assert rules["1.weight"] == ScaleCom(ratio=1 / 25)


@pytest.mark.parametrize("model", [LstmLanguageModel(20, 16, 2, 8), CharTransformer(20, 16)])
def test_weights_of_sequence_models_are_used_once_per_position(model: nn.Module) -> None:
    fast = torch.backends.mha.get_fastpath_enabled()
    found = multiply_adds_per_entry(model, torch.randint(20, (3, 40)))
    assert set(found) == {name for name, p in model.named_parameters() if p.dim() >= 2}
    assert next(iter(found)) == "embedding.weight"
    assert list(found)[-1] == "head.weight"
    tables = ("embedding.weight", "position")
    assert all(count == (0 if name in tables else 40) for name, count in found.items())
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_a_weight_that_is_not_used_is_not_an_end() -> None:
    model = network()
    model.register_parameter("spare", nn.Parameter(torch.zeros(3, 3)))
    rules = dict(scalecom_by_layer(model, torch.randn(5, 1, 16, 16)).rules)
    assert "spare" not in rules
    assert rules["7.weight"] == Dense()


def test_its_text_is_a_method_string() -> None:
    method = scalecom_by_layer(network(), torch.randn(5, 1, 16, 16), beta=beta_for(2048, 256))
    assert parse(str(method)) == method


def trained(learners: int, steps: int = 20) -> tuple[float, float, int, int]:
    """The loss before and after, with rates by layer; bytes that rank 0 sent, and their mean payload."""
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    inputs = torch.randn(4 * learners, 20, generator=rng)
    targets = (inputs @ torch.randn(20, 4, generator=rng)).argmax(1)
    method = scalecom_by_layer(model, inputs[:2], beta=beta_for(4 * learners, 256))
    cohort = Cohort(method, learners, {name: tuple(p.shape) for name, p in model.named_parameters()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(rows: slice) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs[rows]), targets[rows])

    before = float(loss(slice(None)).detach())
    for _ in range(steps):
        gradients = []
        for rank in range(learners):
            optimizer.zero_grad()
            loss(slice(4 * rank, 4 * rank + 4)).backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        results = cohort.average(gradients)
        assert all(same_state(other, results[0]) for other in results[1:])
        for name, parameter in model.named_parameters():
            parameter.grad = results[0][name]
        optimizer.step()
    meter = cohort.driver.meters[0].total
    return before, float(loss(slice(None)).detach()), meter.sent_bytes, meter.payload_bytes


@pytest.fixture(scope="module")
def four() -> tuple[float, float, int, int]:
    return trained(4)


@pytest.mark.parametrize("learners", [64, 128])
def test_many_learners_train_at_constant_cost(learners: int, four: tuple[float, float, int, int]) -> None:
    before, after, sent, payload = trained(learners)
    assert after < 0.6 * before
    # All-reduce sends 2 (W-1)/W of the payload: 1.5 times with 4 learners, at most twice with any number.
    assert sent < 1.4 * four[2]
    assert payload <= four[3]


def test_64_learners_agree_on_few_entries() -> None:
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
