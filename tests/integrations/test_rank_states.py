"""Files of ranks beside a framework's checkpoint: resized, missing, damaged; extras that are missing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import thinwire
from tests.failures.test_checkpointer import logged
from tests.integrations.common import batch, flat, network
from thinwire.errors import StateError
from thinwire.integrations.rank_states import RankStates
from thinwire.net.launch import Worker, run_local


def begin(worker: Worker) -> tuple:
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = thinwire.attach(model, "topk(ratio=0.1)", optimizer=optimizer, dense_below=0)

    def train(steps: range) -> None:
        for step in steps:
            inputs, labels = batch(step, worker.rank)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    return model, session, RankStates(session, model, optimizer, "sum"), train


def write(worker: Worker, folder: str) -> dict[str, torch.Tensor]:
    _, session, states, train = begin(worker)
    train(range(4))
    states.write(Path(folder))
    return {name: each.clone() for name, each in session.residuals().items()}


def read(worker: Worker, folder: str) -> tuple:
    """Load, also from a folder without files, go on, and save; then load a damaged file."""
    model, session, states, train = begin(worker)
    with logged() as lines:
        states.read(Path(folder))
        states.read(Path(folder) / "nothing")
    kept = {name: each.clone() for name, each in session.residuals().items()}
    train(range(4, 6))
    states.write(Path(folder) / "next")
    torch.distributed.barrier()
    if worker.rank == 0:
        (Path(folder) / "next" / "thinwire-rank-1-of-3.pt").write_bytes(b"something else")
    torch.distributed.barrier()
    with pytest.raises(StateError) as caught:
        states.read(Path(folder) / "next")
    return kept, flat(model), str(caught.value), lines


def test_residuals_are_added_up_for_another_number_of_ranks(tmp_path: Path) -> None:
    old = run_local(write, 2, str(tmp_path), timeout=400)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"thinwire-rank-{r}-of-2.pt" for r in range(2)
    ]
    new = run_local(read, 3, str(tmp_path), timeout=400)
    for name in old[0]:
        before, after = sum(rank[name] for rank in old) / 2, sum(rank[0][name] for rank in new) / 3
        assert before.any()
        assert torch.allclose(before, after, atol=1e-6)
    for _, parameters, error, _ in new:
        assert torch.equal(parameters, new[0][1])
        assert "rank 1 cannot load its part of the checkpoint" in error
        assert "not a checkpoint of this version, or its beginning is damaged" in error
    said = "\n".join(new[0][3])
    assert "the checkpoint was written by 2 ranks, and there are 3 now" in said
    assert "nothing has no state of thinwire: residuals start at zero" in said


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers"])
def test_a_missing_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"thinwire.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'thinwire\[{name}\]'"):
        importlib.import_module(f"thinwire.integrations.{name}")
