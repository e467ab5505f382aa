"""What sessions leave in the rendezvous store: nothing that grows with their number."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.hosts.common import loaded_together, mlp, square_loss, wrap
from thinwire.net.launch import Worker, run_local
from thinwire.net.store import default_store

ROUNDS = 3


def train_once(worker: Worker, method: str, folder: str) -> None:
    """Attach, train, write two checkpoints and load the second one, detach."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = module if "every" in method else wrap(module)
    session = thinwire.attach(model, method, optimizer=optimizer)
    checkpointer = thinwire.Checkpointer(folder, session, model, optimizer, every=2)
    for step in range(4):
        optimizer.zero_grad()
        square_loss(model, worker.rank, step).backward()
        optimizer.step()
        checkpointer.step()
    assert checkpointer.load_latest() == 4
    session.detach()


def counted(worker: Worker, method: str, folder: str) -> list[int]:
    """The number of keys in the store, before the first session and after each one."""
    loaded_together(worker, "topk(ratio=0.1)")
    keys = [counted_together()]
    for number in range(ROUNDS):
        train_once(worker, method, f"{folder}/{number}")
        keys.append(counted_together())
    return keys


def counted_together() -> int:
    dist.barrier()
    keys = default_store().num_keys()
    dist.barrier()
    return keys


@pytest.mark.parametrize(
    ("method", "ranks"),
    [
        ("topk(ratio=0.1)", 2),
        ("dense", 1),
        ("localsgd(every=2, overlap=1)", 2),
        ("hierarchical(outer=topk(ratio=0.1), local=2)", 4),
    ],
)
def test_no_key_of_a_session_is_left(method: str, ranks: int, tmp_path: Path) -> None:
    for keys in run_local(counted, ranks, method, str(tmp_path)):
        before, first, *later = keys
        assert later == [first] * (ROUNDS - 1), f"keys after each session: {keys}"
        groups = 3 if "hierarchical" in method else 1
        assert first - before <= groups * ranks, "more than a counter per process and group"
