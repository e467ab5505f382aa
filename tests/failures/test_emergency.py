"""After a failure with a sync round under way, what was committed last can be read, saved and loaded."""

import os

import pytest
import torch

import thinwire
from tests.hosts.common import flat, mlp, square_loss
from thinwire.net.launch import Worker, start_local
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.periodic import PeriodicSession

METHOD = "diloco(every=4, fragments=2, overlap=1)"


def train(session: PeriodicSession, model: torch.nn.Module, rank: int, steps: range) -> None:
    (optimizer,) = session.optimizers
    for step in steps:
        optimizer.zero_grad()
        square_loss(model, rank, step).backward()
        optimizer.step()


def peer_dies(worker: Worker, look_first: bool) -> dict[str, object] | None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = thinwire.attach(model, METHOD, optimizer=optimizer)
    train(session, model, worker.rank, range(5))
    if worker.rank == 1:
        os._exit(7)
    train(session, model, worker.rank, range(5, 6))  # a sync round begins, and the peer is gone
    assert session.under_way
    if look_first:
        session.sealed()  # must not hide the failure from the training loop
    with pytest.raises(thinwire.PeerError):
        train(session, model, worker.rank, range(6, 8))
    state = session.sealed()
    with pytest.raises(thinwire.PeerError):
        train(session, model, worker.rank, range(8, 9))
    session.load_state_dict(state)
    common = flat(session.common_parameters().values())
    session.detach()
    return {"state": state, "common": common, "anchors": flat(state["anchors"].values())}


@pytest.mark.parametrize("look_first", [False, True])
def test_the_last_committed_state_is_left(look_first: bool) -> None:
    first, second = start_local(peer_dies, 2, look_first, timeout=400, group_timeout=30)
    assert first.error is None, first.error
    assert second.exit_code == 7
    found = first.value
    assert torch.equal(found["common"], found["anchors"])
    state = found["state"]
    assert not state["under_way"]
    assert state["sync_rounds"] == 2, "the sync round that failed does not count"
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fresh = PeriodicSession(model, thinwire.parse(METHOD), optimizer, rank_info=RankInfo(0, 2))
    fresh.load_state_dict(state)
    assert fresh.step == state["clock"]["step"] >= 6
