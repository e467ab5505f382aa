"""PyTorch's distributed checkpoint: the session is Stateful, and every rank's state survives."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.hosts.common import square_loss
from tests.integrations.common import flat
from thinwire.errors import StateError
from thinwire.net.launch import Worker, run_local
from thinwire.net.rank_info import RankInfo

METHODS = ("dense", "topk(ratio=0.1)", "powersgd(rank=2)", "pqasgd(every=4, bits=8)")
RESIZED = ("topk(ratio=0.1) sum", "topk(ratio=0.1) drop", "pqasgd(every=4, bits=8) sum")


class Run:
    def __init__(self, method: str) -> None:
        torch.manual_seed(1)
        layers = torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40)
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.session = thinwire.attach(self.model, method, optimizer=self.optimizer, dense_below=0)

    def train(self, worker: Worker, steps: range) -> torch.Tensor:
        for step in steps:
            self.optimizer.zero_grad()
            square_loss(self.model, worker.rank, step).backward()
            self.optimizer.step()
        return flat(self.model)

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "thinwire": self.session}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        # The session comes last: a schedule sets this rank's own model and optimizer.
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        dcp.load({"thinwire": self.session}, checkpoint_id=path)


def folder(root: str, method: str) -> Path:
    return Path(root) / method.partition("(")[0]


def residuals(session: thinwire.Session) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in session.residuals().items()}


def save_and_go_on(worker: Worker, root: str) -> dict[str, tuple]:
    warnings.simplefilter("ignore")  # DCP's own
    found = {}
    for method in METHODS:
        straight, resumed = Run(method), Run(method)
        assert isinstance(straight.session, Stateful)
        straight.train(worker, range(8 if "every" in method else 6))
        straight.save(folder(root, method))
        kept = residuals(straight.session)
        resumed.load(folder(root, method))
        more = range(8, 15)
        found[method] = straight.train(worker, more), resumed.train(worker, more), kept
        straight.session.detach()
        resumed.session.detach()
    return found


def continue_resized(worker: Worker, root: str) -> dict[str, tuple]:
    warnings.simplefilter("ignore")
    found = {}
    for label in RESIZED:
        method, how = label.rsplit(" ", 1)
        run = Run(method)
        if how == "drop":
            with pytest.raises(CheckpointException, match=r"Missing key in checkpoint.*rank \d of"):
                run.load(folder(root, method))
        run.session.expect(folder(root, method), on_resize=how)
        run.load(folder(root, method))
        found[label] = residuals(run.session), run.train(worker, range(4))
        run.session.detach()
    return found


def test_every_rank_keeps_its_state(tmp_path: Path) -> None:
    two = run_local(save_and_go_on, 2, str(tmp_path), timeout=400)
    for method in METHODS:
        for straight, resumed, _ in (rank[method] for rank in two):
            assert torch.equal(straight, resumed), method
    kept = [rank["topk(ratio=0.1)"][2]["0.weight"] for rank in two]
    assert not torch.equal(*kept), "each rank has residuals of its own"
    keys = FileSystemReader(folder(str(tmp_path), "topk")).read_metadata().state_dict_metadata
    assert {f"thinwire.rank {rank} of 2.parameter 0.weight" for rank in range(2)} <= set(keys)

    for size in (1, 3):
        resized = run_local(continue_resized, size, str(tmp_path), timeout=400)
        for label in RESIZED:
            method, how = label.rsplit(" ", 1)
            for name in two[0][method][2]:
                old = sum(rank[method][2][name] for rank in two) / 2
                new = sum(rank[label][0][name] for rank in resized) / size
                wanted = old if how == "sum" else torch.zeros_like(old)
                assert torch.allclose(new, wanted, atol=1e-6), f"{label}: {name} on {size} ranks"
            for rank in resized:
                assert torch.equal(rank[label][1], resized[0][label][1]), label


def in_groups(worker: Worker, folder: str) -> bool:
    """Two groups of two ranks, as the replicas of two shards: each rank of each group keeps its own state."""
    warnings.simplefilter("ignore")
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    sessions = []
    for seed in (1, 2):  # the second begins with other values and loads those of the first
        rng = torch.Generator().manual_seed(10 * seed + worker.rank)
        named = {"shard": torch.zeros(20, 20)}
        session = thinwire.Session(named.items(), "topk(ratio=0.1)", groups[worker.rank % 2], dense_below=0)
        session.average({"shard": torch.randn(20, 20, generator=rng)})
        sessions.append(session)
    dcp.save({"thinwire": sessions[0]}, checkpoint_id=folder)
    dcp.load({"thinwire": sessions[1]}, checkpoint_id=folder)
    first, second = (session.residuals()["shard"] for session in sessions)
    return torch.equal(first, second)


def test_groups_of_replicas_do_not_mix_their_states(tmp_path: Path) -> None:
    assert run_local(in_groups, 4, str(tmp_path), timeout=400) == [True] * 4


def test_a_folder_without_a_session_is_refused(tmp_path: Path) -> None:
    session = thinwire.Session({"w": torch.zeros(4, 4)}.items(), "topk", rank_info=RankInfo(0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(StateError, match="has no state of a thinwire session"):
        session.expect(tmp_path)
    packed = session.state_dict()
    packed["rank 0 of 1"]["parameter w"] = ("damaged",)
    with pytest.raises(StateError, match=r"'parameter w' of rank 0 of 1 is not as it was saved"):
        session.load_state_dict(packed)
    del packed["rank 0 of 1"]["session"], packed["rank 0 of 1"]["parameter w"]
    with pytest.raises(StateError, match="has no 'session'"):
        session.load_state_dict(packed)
