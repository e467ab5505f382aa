"""One of four ranks is killed at some moment: all survivors name it, and nobody else."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import thinwire
from tests.hosts.common import loaded_together, mlp, square_loss, wrap
from thinwire.net.launch import Outcome, Worker, start_local
from thinwire.net.roll_call import GRACE_SECONDS

TIMEOUT = 90.0
# Far less than the timeout: a death is noticed by its broken connections.
SOON = GRACE_SECONDS + 40.0
RANKS = 4


def averaging(worker: Worker, method: str, overlap: bool):
    model = wrap(mlp())
    session = thinwire.attach(model, method, overlap=overlap)
    return lambda number: square_loss(model, worker.rank, number).backward(), session


def periodic(worker: Worker, method: str, overlap: bool):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = thinwire.attach(model, method, optimizer=optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        square_loss(model, worker.rank, number).backward()
        optimizer.step()

    return step, session


def one_is_killed(worker: Worker, method: str, overlap: bool, culprit: int, after: float) -> tuple | None:
    """Train until something happens; returns the error and how long ago the culprit was to die."""
    make = periodic if "every" in method else averaging
    loaded_together(worker, "qsgd" if make is periodic else method)
    step, session = make(worker, method, overlap)
    for number in range(3):  # DDP itself talks after the first one, about its buckets
        step(number)
    torch.distributed.barrier()
    die = time.monotonic() + after
    if worker.rank == culprit:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(3, 10**6):
        try:
            step(number)
        except RuntimeError as error:
            seconds = time.monotonic() - die
            session.detach()
            return type(error).__name__, str(error), seconds
    return None


# Overlapped or not; a mean alone, a gather, several rounds, sync rounds in the background.
CASES = [
    ("topk(ratio=0.1)", True, 1, 0.00),
    ("topk(ratio=0.1)", True, 0, 0.21),
    ("topk(ratio=0.1, reduce='split')", True, 2, 0.13),
    ("powersgd(rank=1)", False, 3, 0.07),
    ("powersgd(rank=1)", True, 2, 0.11),
    ("dense", True, 1, 0.05),
    ("delayed(method=topk(ratio=0.1))", True, 1, 0.15),
    ("pqasgd(every=4, fragments=2, overlap=1)", True, 0, 0.17),
    ("pqasgd(every=4, fragments=2, overlap=1)", True, 2, 0.02),
    ("postlocal(every=4)", True, 1, 0.09),  # in its warm-up
]


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple, list[Outcome]]:
    """Two cases at a time: they spend most of their time waiting."""

    def run(case: tuple) -> tuple[tuple, list[Outcome]]:
        return case, start_local(one_is_killed, RANKS, *case, timeout=400, group_timeout=TIMEOUT)

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(run, CASES))


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_all_survivors_name_the_dead_rank_alone(case: tuple, outcomes: dict) -> None:
    _, _, culprit, _ = case
    for outcome in outcomes[case]:
        if outcome.rank == culprit:
            assert outcome.exit_code == -signal.SIGKILL
            continue
        assert outcome.value is not None, outcome
        kind, text, seconds = outcome.value
        assert kind == "PeerError", text
        assert f"no word from rank {culprit}: dead" in text
        assert "ended its training" not in text
        assert seconds < SOON
        assert outcome.exit_code == 0
