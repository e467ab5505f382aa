"""Replica groups of two ranks, with the real torchft: DDP or FSDP2 inside of a group, thinwire between."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.averaging import Schedule
from thinwire.core.shards import local
from thinwire.net.launch import Outcome, Worker, start_local
from thinwire.sessions.preparation import prepare_for
from thinwire.tools.workloads.data import digits

torchft = pytest.importorskip("torchft", reason="needs thinwire[torchft]")
coordination = pytest.importorskip("torchft.coordination")

RANKS = 2
# torchft logs several lines in every step; its Rust part takes this where a process starts.
os.environ.setdefault("RUST_LOG", "error")


def own_world(folder: Path, rank: int) -> dist.TCPStore:
    """The ranks of a group have a process group and a store of their own, as torchrun would give them."""
    dist.destroy_process_group()
    file = folder / "port"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(file)
    else:
        while not file.exists():
            time.sleep(0.02)
        store = dist.TCPStore("localhost", int(file.read_text()), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    return store


def wrapped(model: nn.Sequential, inside: str) -> nn.Module:
    if inside == "ddp":
        return DistributedDataParallel(model)
    if inside == "fsdp":
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model[1::2]:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def learn(worker: Worker, lighthouse: str, method: str, inside: str, gates: list[str], pause: float) -> dict:
    """One rank of a replica group that learns the digits; the group begins when its gate exists.

    It ends after the step that stands in the file "end", once that exists.
    """
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    dist.barrier()  # nobody leaves this process group while another rank is still connecting
    place, rank = divmod(worker.rank, RANKS)
    number = min(place, 1)  # the third group takes the place of the second
    gate = Path(gates[place])
    while not gate.exists():
        time.sleep(0.02)
    folder, end = gate.with_name(f"group{place}"), gate.with_name("end")
    folder.mkdir(exist_ok=True)
    store = own_world(folder, rank)
    torch.manual_seed(3)
    layers = [nn.Flatten(), nn.Linear(64, 129), nn.ReLU(), nn.Linear(129, 10)]
    model = wrapped(nn.Sequential(*layers), inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    chosen, data = thinwire.parse(method), digits()
    periodic = isinstance(chosen, Schedule)
    prepare_for([chosen.inner if periodic else chosen], loud=False)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    (folder / f"ready-{rank}").touch()
    together = [gate.with_name(f"group{p}") / "ready-0" for p, each in enumerate(gates) if each == str(gate)]
    while not all(path.exists() for path in together):
        time.sleep(0.02)
    timeout = timedelta(seconds=60)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        replica_id=f"group{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=rank,
        world_size=RANKS,
        lighthouse_addr=lighthouse,
    )
    session = thinwire.attach(model, chosen, manager=manager, optimizer=optimizer, dense_below=0)
    stepper = optimizer if periodic else torchft.Optimizer(manager, optimizer)
    began, sizes = -1, set()
    while not end.exists() or session.step < int(end.read_text()):
        rng = torch.Generator().manual_seed(10_000 * number + 1000 * rank + session.step)
        inputs, labels = data.batch(torch.randint(len(data.inputs), (32,), generator=rng))
        stepper.zero_grad()
        began = session.step if began < 0 else began
        cross_entropy(model(inputs), labels).backward()
        stepper.step()
        sizes.add(session.rank_info.size)
        worker.report((os.getpid(), session.step))
        time.sleep(pause)
    session.finish()
    manager.shutdown(wait=False)
    parameters = torch.cat([local(p).flatten() for p in model.parameters()])
    accuracy = float((model(data.test_inputs).argmax(1) == data.test_targets).float().mean())
    return {
        "model": parameters,
        "accuracy": accuracy,
        "began": began,
        "sizes": sizes,
        "payload": session.meter.total.payload_bytes / session.meter.steps,
        "dense": session.dense_bytes,
        "log": "\n".join(log),
    }


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )
    yield server.address()
    server.shutdown()


def result_of(outcome: Outcome) -> dict:
    assert outcome.error is None, f"worker {outcome.rank}: {outcome.error}"
    return outcome.value


@pytest.mark.parametrize(
    ("inside", "method"),
    [
        ("fsdp", "topk(ratio=0.05)"),
        pytest.param("ddp", "topk(ratio=0.05)", marks=pytest.mark.slow),
        pytest.param("ddp", "qsgd(bits=4)", marks=pytest.mark.slow),
        pytest.param("fsdp", "pqasgd(every=4, bits=8)", marks=pytest.mark.slow),
    ],
)
def test_a_group_of_two_ranks_is_killed_and_comes_back(
    inside: str, method: str, lighthouse: str, tmp_path: Path
) -> None:
    now, later, end = tmp_path / "now", tmp_path / "later", tmp_path / "end"
    now.touch()
    pids: dict[int, int] = {}
    at_death: list[int] = []

    def hear(worker: int, said: tuple[int, int]) -> None:
        pids[worker], step = said
        if not at_death and step >= 20 and {2, 3} <= pids.keys():
            for victim in (2, 3):
                os.kill(pids[victim], signal.SIGKILL)
            at_death.append(step)
        elif at_death and worker == 0 and step >= at_death[0] + 8:
            later.touch()
        elif worker == 4 and not end.exists():
            (tmp_path / "new").write_text(str(step + 40))
            (tmp_path / "new").rename(end)  # all ranks see it long before that step

    gates = [str(now), str(now), str(later)]
    outcomes = start_local(
        learn, 6, lighthouse, method, inside, gates, 0.05, timeout=400, group_timeout=120, on_report=hear
    )
    assert [outcomes[rank].exit_code for rank in (2, 3)] == [-signal.SIGKILL] * 2, [o.error for o in outcomes]
    first = [result_of(outcomes[rank]) for rank in (0, 1)]
    healed = [result_of(outcomes[rank]) for rank in (4, 5)]
    for old, new in zip(first, healed, strict=True):
        assert torch.equal(old["model"], new["model"]), "the groups differ"
        assert old["accuracy"] == new["accuracy"] > 0.8
        assert new["began"] >= at_death[0] + 8
        assert new["sizes"] == {2}
        assert old["sizes"] == {1, 2}
        assert old["payload"] < 0.6 * old["dense"]
    if inside == "ddp":
        assert torch.equal(first[0]["model"], first[1]["model"]), "the ranks of a group differ"
    else:
        assert first[0]["dense"] != first[1]["dense"], "the shards of 129 rows are of different sizes"
    assert "group1 left: its residuals are dropped" in first[0]["log"]
    assert "group1 joined with empty residuals" in first[0]["log"]
    assert "group1 joined" not in first[1]["log"], "one rank of a group speaks for it"
    assert "group1 starts from a peer's model, with empty residuals" in healed[1]["log"]


def test_ranks_that_do_not_average_inside_of_their_group_are_found(lighthouse: str, tmp_path: Path) -> None:
    (tmp_path / "now").touch()
    (tmp_path / "end").write_text("100")
    gates = [str(tmp_path / "now")]
    outcomes = start_local(learn, 2, lighthouse, "topk(ratio=0.05)", "none", gates, 0.0, timeout=400)
    for outcome in outcomes:
        assert "DisagreementError: the ranks of this replica group have different models" in outcome.error
        assert "DistributedDataParallel" in outcome.error
