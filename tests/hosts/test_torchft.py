"""Replica groups in processes of their own, with the real torchft: one is killed, and comes back."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy

import thinwire
from thinwire.averaging import Schedule
from thinwire.net.launch import Outcome, Worker, start_local
from thinwire.sessions.preparation import prepare_for
from thinwire.tools.workloads.data import digits

torchft = pytest.importorskip("torchft", reason="needs thinwire[torchft]")
coordination = pytest.importorskip("torchft.coordination")

STEPS = 160
KILL_AT = 40
METHODS = (
    "topk(ratio=0.05)",
    "qsgd(bits=4)",
    "pqasgd(every=4, bits=8)",
    "adam(exchange=qsgd(bits=8), warmup=20)",
)


def learn(
    worker: Worker, lighthouse: str, method: str, places: list[str], pause: float, stop_at: int | None = None
) -> dict:
    """One replica group that learns the digits. `places[rank]` is a file: it begins when that exists.

    After step `stop_at` the last rank stops, until somebody lets it continue.
    """
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    number = 1 if worker.rank == 3 else worker.rank  # the fourth process takes the place of the dead one
    torch.manual_seed(number)  # each begins with a model of its own: the first quorum settles it
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    chosen, data = thinwire.parse(method), digits()
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.002)
        if chosen.name == "adam"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    )
    periodic = isinstance(chosen, Schedule)
    prepare_for([chosen.inner if periodic else chosen], loud=False)
    while not Path(places[worker.rank]).exists():
        time.sleep(0.02)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    timeout = timedelta(seconds=30)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        replica_id=f"group{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
    )
    session = thinwire.attach(model, chosen, manager=manager, optimizer=optimizer)
    stepper = optimizer if periodic else torchft.Optimizer(manager, optimizer)
    began, slowest = -1, 0.0
    while session.step < STEPS:
        begin = time.monotonic()
        rng = torch.Generator().manual_seed(1000 * number + session.step)
        inputs, labels = data.batch(torch.randint(len(data.inputs), (32,), generator=rng))
        stepper.zero_grad()
        began = session.step if began < 0 else began
        cross_entropy(model(inputs), labels).backward()
        stepper.step()
        slowest = max(slowest, time.monotonic() - begin)
        worker.report((os.getpid(), session.step))
        if session.step == stop_at and worker.rank == worker.size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(pause)
    session.finish()
    manager.shutdown(wait=False)
    return {
        "model": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "accuracy": float((model(data.test_inputs).argmax(1) == data.test_targets).float().mean()),
        "began": began,
        "slowest": slowest,
        "payload": session.meter.total.payload_bytes / session.meter.steps,
        "dense": session.dense_bytes,
        "metrics": session.metrics(),
        "log": "\n".join(log),
    }


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )
    yield server.address()
    server.shutdown()


def undisturbed(lighthouse: str, method: str, folder: Path) -> dict:
    (folder / "now").touch()
    outcomes = start_local(learn, 3, lighthouse, method, [str(folder / "now")] * 3, 0.0, timeout=400)
    values = [result_of(outcome) for outcome in outcomes]
    assert all(torch.equal(value["model"], values[0]["model"]) for value in values)
    return values[0]


def result_of(outcome: Outcome) -> dict:
    assert outcome.error is None, f"group {outcome.rank}: {outcome.error}"
    return outcome.value


@pytest.mark.parametrize(
    "method", [METHODS[0], *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS[1:])]
)
def test_a_group_is_killed_and_comes_back(method: str, lighthouse: str, tmp_path: Path) -> None:
    now, later = tmp_path / "now", tmp_path / "later"
    now.touch()
    reached: dict[int, int] = {}
    at_death: list[int] = []

    def hear(rank: int, said: tuple[int, int]) -> None:
        pid, reached[rank] = said
        if rank == 1 and reached[rank] >= KILL_AT and not at_death:
            os.kill(pid, signal.SIGKILL)
            at_death.append(max(reached.values()))
        elif rank == 0 and at_death and reached[0] >= at_death[0] + 10:
            later.touch()  # the others go on: now the replacement may begin

    files = [str(now)] * 3 + [str(later)]
    outcomes = start_local(learn, 4, lighthouse, method, files, 0.02, timeout=400, on_report=hear)
    assert outcomes[1].exit_code == -signal.SIGKILL
    first, third, replacement = (result_of(outcomes[rank]) for rank in (0, 2, 3))
    for value in (third, replacement):
        assert torch.equal(value["model"], first["model"]), "the replicas differ"
    assert replacement["began"] >= at_death[0] + 10, "it did not start from the others' model"
    for value in (first, third, replacement):
        assert value["payload"] < 0.6 * value["dense"]
        assert value["metrics"]["bytes_sent"] > value["metrics"]["steps"] > 0
        assert value["metrics"]["ratio_to_dense"] < 1
    assert "group1 left: its residuals are dropped" in first["log"] + third["log"]
    assert "group1 joined with empty residuals" in first["log"] + third["log"]
    assert "group1 starts from a peer's model, with empty residuals" in replacement["log"]
    calm = undisturbed(lighthouse, method, tmp_path)
    assert calm["accuracy"] > 0.8
    assert first["accuracy"] >= calm["accuracy"] - 0.01
    print(f"{method}: {first['accuracy']:.4f} with a death, {calm['accuracy']:.4f} without")


def test_nobody_waits_for_a_late_group_longer_than_the_deadline(lighthouse: str, tmp_path: Path) -> None:
    """A group is stopped between two sync rounds, for longer than the deadline (the lighthouse's second).

    It goes on when the others are further: who waits for it does so until the timeout, 30 seconds.
    """
    stopped, continued = [], []

    def hear(rank: int, said: tuple[int, int]) -> None:
        if rank == 2 and said[1] == 41:
            stopped.append(said[0])
        elif rank == 0 and stopped and not continued and said[1] >= 80:
            # The others are ten sync rounds further.
            os.kill(stopped[0], signal.SIGCONT)
            continued.append(said[1])

    (tmp_path / "now").touch()
    files = [str(tmp_path / "now")] * 3
    method = "pqasgd(every=4, bits=8, deadline=1)"
    outcomes = start_local(learn, 3, lighthouse, method, files, 0.02, 41, timeout=400, on_report=hear)
    first, second, late = map(result_of, outcomes)
    assert continued
    assert torch.equal(first["model"], second["model"])
    assert torch.equal(first["model"], late["model"])
    assert max(first["slowest"], second["slowest"]) < 20, "somebody waited for the late group"
    assert "group2 was late: its change is part of the next sync round" in late["log"]
    assert "group2 is back" in first["log"] + second["log"]
    assert first["accuracy"] > 0.8
