"""`thinwire.record`: a no-op outside of a run, checked inside."""

import subprocess
import sys
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch

import thinwire
from thinwire import log


def test_it_does_nothing_outside_and_needs_no_torch() -> None:
    code = "import sys, thinwire; thinwire.record(loss='nonsense'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def found() -> Iterator[list[tuple[Mapping[str, float], int | None]]]:
    noted: list[tuple[Mapping[str, float], int | None]] = []
    log.use_recorder(lambda values, step: noted.append((values, step)))
    yield noted
    log.use_recorder(None)


def test_numbers_of_all_kinds(found: list[tuple[Mapping[str, float], int | None]]) -> None:
    thinwire.record(a=1, b=0.5, c=torch.tensor([2.0]), d=np.float32(3), step=4)
    thinwire.record(e=torch.tensor(1.0, requires_grad=True))
    assert found == [({"a": 1, "b": 0.5, "c": 2, "d": 3}, 4), ({"e": 1.0}, None)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"loss": "0.5"}, "loss is a str, not a number"),
        ({"loss": None}, "loss is a NoneType"),
        ({"loss": True}, "loss is a bool"),
        ({"loss": torch.zeros(2)}, "loss is a tensor of several entries"),
        ({"loss": 1.0, "step": -1}, "step is a number of steps"),
        ({"loss": 1.0, "step": 1.5}, "step is a number of steps"),
    ],
)
@pytest.mark.usefixtures("found")
def test_anything_else_is_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        thinwire.record(**values)
