"""A rank that ends its training while the others go on: they name it, and say after how many steps."""

import contextlib
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from tests.failures.test_peers import Caught, caught
from tests.hosts.common import loaded_together, mlp, square_loss, wrap
from thinwire.net.launch import Outcome, Worker, start_local
from thinwire.net.store import default_store
from thinwire.sessions.base import BaseSession

RANKS = 3
TIMEOUT = 60.0


def training(worker: Worker, host: str, folder: str | None = None):
    """A step of this host, its session, and what saves it in a folder."""
    buffers = [nn.BatchNorm1d(40)] if host == "DDP's buffers" else []
    module = nn.Sequential(*mlp(), *buffers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    if host.startswith("localsgd"):
        model, method = module, host
    else:
        model = wrap(module, find_unused_parameters=host == "DDP's unused parameters")
        method = host if host in ("dense", "topk(ratio=0.1)") else "topk(ratio=0.1)"
    session = thinwire.attach(model, method, optimizer=optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        square_loss(model, worker.rank, number).backward()
        optimizer.step()

    saving = None if folder is None else thinwire.Checkpointer(folder, session, model, optimizer)
    return step, session, saving


def one_leaves(worker: Worker, host: str, how: str, steps: int) -> Caught | None:
    loaded_together(worker, "topk(ratio=0.1)")
    step, session, _ = training(worker, host)
    for number in range(steps):
        step(number)
    if worker.rank == RANKS - 1:
        leave(session, how)
        return None
    seen = caught(lambda: [step(number) for number in range(steps, steps + 9)], session.detach)
    default_store().set(f"seen/{worker.rank}", "")
    return seen


def leave(session: BaseSession, how: str) -> None:
    match how:
        case "destroys its groups":  # and then returns
            dist.destroy_process_group()
        case "detaches":  # and stays until the others have noticed
            session.detach()
            default_store().wait([f"seen/{rank}" for rank in range(RANKS - 1)], timedelta(seconds=TIMEOUT))
        case "ends":
            raise SystemExit(0)


# In the second step, and where there are buffers in every one, DDP talks itself before the session does.
CASES = (
    ("topk(ratio=0.1)", "destroys its groups", 3),
    ("topk(ratio=0.1)", "ends", 1),
    ("dense", "detaches", 3),
    ("DDP's buffers", "ends", 3),
    ("DDP's unused parameters", "detaches", 3),
    ("localsgd(every=2)", "destroys its groups", 3),
    ("localsgd(every=4, overlap=2)", "ends", 5),
)


# A host, and the steps that a rank takes after a restart before it dies.
DEATHS = (("topk(ratio=0.1)", 1), ("DDP's buffers", 2), ("DDP's unused parameters", 2))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, list[Outcome]]:
    def run(given: tuple) -> tuple[tuple, list[Outcome]]:
        function, *arguments = given
        if function is one_dies_after_a_restart:
            arguments.append(str(tmp_path_factory.mktemp("checkpoints")))
        return given, start_local(function, RANKS, *arguments, timeout=200, group_timeout=TIMEOUT)

    runs = [
        *((one_leaves, *case) for case in CASES),
        *((one_dies_after_a_restart, *case) for case in DEATHS),
        *((host_of_the_store, culprit) for culprit in (0, 2)),
    ]
    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(run, runs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_the_others_name_a_rank_that_leaves(case: tuple, outcomes: dict) -> None:
    *_, steps = case
    for outcome in outcomes[one_leaves, *case][: RANKS - 1]:
        seen: Caught = outcome.value
        assert seen is not None, outcome
        assert seen.kind == "PeerError", seen
        left = f"rank {RANKS - 1} ended its training after {steps} step{'s' if steps > 1 else ''}, while"
        assert left in seen.error, seen
        assert "give all ranks the same number of steps" in seen.error
        assert not seen.threads


# -- a rank dies while DDP talks itself --------------------------------------------------------------------


def one_dies_after_a_restart(worker: Worker, host: str, steps: int, folder: str) -> Caught | None:
    """A new model and session continue from a checkpoint. In its second step DDP compares its buckets."""
    loaded_together(worker, "topk(ratio=0.1)")
    for _ in range(2):
        step, session, checkpointer = training(worker, host, folder)
        begin = checkpointer.load_latest()
        if begin == 0:
            step(0)
            checkpointer.steps = 1
            checkpointer.save()
            checkpointer.wait()
            session.detach()
    assert begin == 1
    for number in range(steps):
        step(1 + number)
    if worker.rank == RANKS - 1:
        os._exit(7)
    return caught(lambda: step(1 + steps), session.detach)


@pytest.mark.parametrize("case", DEATHS, ids=lambda case: ", ".join(map(str, case)))
def test_a_death_is_named_when_ddp_notices_it_first(case: tuple, outcomes: dict) -> None:
    *survivors, _ = outcomes[one_dies_after_a_restart, *case]
    for outcome in survivors:
        seen: Caught = outcome.value
        assert seen is not None, outcome
        assert seen.kind == "PeerError", seen
        assert f"no word from rank {RANKS - 1}: dead" in seen.error, seen


# -- the store is in a process of the ranks ----------------------------------------------------------------


def host_of_the_store(worker: Worker, culprit: int) -> Caught | None:
    """As with `env://` or `tcp://`: rank 0 keeps the store, and its process ends with it or without it."""
    loaded_together(worker, "topk(ratio=0.1)")
    port = torch.zeros(1, dtype=torch.int64)
    if worker.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast(port, 0)
    if worker.rank != 0:
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.destroy_process_group()
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=RANKS, timeout=timeout)
    step, session, _ = training(worker, "topk(ratio=0.1)")
    for number in range(3):
        step(number)
    if worker.rank == culprit:
        raise SystemExit(0)
    seen = caught(lambda: [step(number) for number in itertools.count(3)], session.detach)
    with contextlib.suppress(RuntimeError):
        dist.barrier()  # until the other survivor has seen it, too
    return seen


@pytest.mark.parametrize("culprit", [0, 2])
def test_the_store_may_end_with_the_rank_that_leaves(culprit: int, outcomes: dict) -> None:
    survivors = [one for one in outcomes[host_of_the_store, culprit] if one.rank != culprit]
    for outcome in survivors:
        seen: Caught = outcome.value
        assert seen is not None, outcome
        assert seen.kind == "PeerError", seen
        named = f"rank {culprit} ended its training after 3 steps, while the others went on"
        gone = "the rendezvous store does not answer: its host (usually rank 0) is gone. It died, or it ended"
        assert named in seen.error or (culprit == 0 and gone in seen.error), seen
        assert "give all ranks the same number of steps" in seen.error
