"""Many workers that share a model: gradients in one pass, steps without compression."""

from dataclasses import replace

import pytest
import torch

from reproductions import cohort
from reproductions.cohort import TOGETHER, Cohort, Recipe, train
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.data import digits, synthetic

IMAGES, TEXT = digits(), synthetic()


@pytest.mark.parametrize(
    ("model", "hidden", "data"),
    [
        ("mlp", (32,), IMAGES),
        ("cnn", (4, 8, 8, 16), IMAGES),
        ("resnet20", (), IMAGES),
        ("lstm", (16, 16), TEXT),
        ("transformer", (32, 32), TEXT),
    ],
)
def test_gradients_of_all_workers_in_one_pass_are_their_own(
    model: str, hidden: tuple[int, ...], data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(model, TOGETHER, batch=3, hidden=hidden, group_norm=True)
    together = Cohort("dense", recipe, data)
    value, found = together.gradients()
    monkeypatch.setattr(cohort, "TOGETHER", TOGETHER + 1)
    one_by_one = Cohort("dense", recipe, data)
    wanted_value, wanted = one_by_one.gradients()
    assert value == pytest.approx(wanted_value, rel=1e-5)
    assert [list(own) for own in found] == [list(own) for own in wanted]
    for own, other in zip(found, wanted, strict=True):
        for name, gradient in other.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=1e-5)


def test_the_first_steps_are_those_of_dense_and_are_not_metered() -> None:
    recipe = Recipe("mlp", 2, steps=8, batch=8, hidden=(32,), momentum=0.9)
    late = replace(recipe, uncompressed=5)
    dense, sparse, both = (
        train(method, given, IMAGES, looks=8)
        for method, given in (("dense", recipe), ("topk(ratio=0.01)", recipe), ("topk(ratio=0.01)", late))
    )
    losses = [[value for _, value in run.losses] for run in (dense, sparse, both)]
    assert losses[2][:6] == pytest.approx(losses[0][:6], rel=1e-5)  # that of step 6 is before its update
    assert losses[2][7] != pytest.approx(losses[0][7], rel=1e-5)
    assert losses[1][5] != pytest.approx(losses[0][5], rel=1e-5)
    assert both.payload == pytest.approx(sparse.payload, rel=0.05)
