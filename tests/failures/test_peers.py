"""A rank that dies or stalls: the others raise in time, say who and where, and end in good order."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.hosts.common import loaded_together, mlp, square_loss, wrap
from thinwire.net.launch import Outcome, Worker, start_local
from thinwire.net.roll_call import GRACE_SECONDS

TIMEOUT = 16.0  # torch may look a name up for five seconds, in vain
# What a loaded machine may take to come to the failing operation and to say so; less than a second timeout.
SLACK = 12.0
BAD_STEP = 3


@dataclass
class Caught:
    """What a survivor saw."""

    error: str
    kind: str
    seconds: float
    threads: list[str]


def lane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]


def caught(step, detach) -> Caught | None:
    """Run one step; what it raised, and what is left after detaching."""
    begin = time.monotonic()
    try:
        step()
    except RuntimeError as error:
        seconds = time.monotonic() - begin
        detach()
        return Caught(str(error), type(error).__name__, seconds, lane_threads())
    return None


class Nested(nn.Module):
    """All of it under a reentrant checkpoint: DDP's buckets come from a backward pass inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=True)


def misbehave(how: str) -> None:
    if how == "die":
        os._exit(7)
    if how == "stall":
        time.sleep(TIMEOUT + GRACE_SECONDS + 1)


def ddp_step(worker: Worker, method: str, overlap: bool, nested: bool = False):
    model = wrap(Nested() if nested else mlp())
    session = thinwire.attach(model, method, overlap=overlap)

    def step(number: int) -> None:
        square_loss(model, worker.rank, number).backward()

    return step, session.detach


def average_step(worker: Worker, method: str):
    module = mlp()
    session = thinwire.Session(module.named_parameters(), method)

    def step(number: int) -> None:
        module.zero_grad()
        square_loss(module, worker.rank, number).backward()
        session.average({name: p.grad for name, p in module.named_parameters()}, in_place=True)

    return step, session.detach


HOSTS = {
    "overlap": lambda worker, method: ddp_step(worker, method, True),
    "blocking": lambda worker, method: ddp_step(worker, method, False),
    "nested": lambda worker, method: ddp_step(worker, method, True, nested=True),
    "average": average_step,
}


def one_misbehaves(worker: Worker, host: str, method: str, how: str, culprit: int) -> Caught | None:
    loaded_together(worker, method)
    step, detach = HOSTS[host](worker, method)
    for number in range(BAD_STEP):
        step(number)
    if worker.rank == culprit:
        misbehave(how)
    return caught(lambda: step(BAD_STEP), detach)


CASES = {
    (host, method, how, culprit)
    for how, culprit in (("die", 1), ("stall", 0))
    for host, method in (
        ("overlap", "topk(ratio=0.1)"),
        ("overlap", "dense"),
        ("blocking", "powersgd(rank=1)"),
        ("nested", "topk(ratio=0.1)"),
        ("average", "qsgd"),
    )
}


@pytest.mark.parametrize("case", sorted(CASES), ids=lambda case: ", ".join(map(str, case)))
def test_the_others_raise_in_time_and_name_the_culprit(case: tuple, outcomes: dict) -> None:
    _, _, how, culprit = case
    for outcome in outcomes[one_misbehaves, *case]:
        if outcome.rank == culprit:
            assert outcome.exit_code == (7 if how == "die" else 0)
            continue
        seen: Caught = outcome.value
        assert seen is not None, f"rank {outcome.rank} did not raise: {outcome}"
        assert seen.kind == "PeerError", f"rank {outcome.rank}: {seen}"
        assert f"of step {BAD_STEP} failed on rank {outcome.rank}" in seen.error
        assert f"no word from rank {culprit}: " in seen.error
        assert seen.seconds < TIMEOUT + GRACE_SECONDS + SLACK
        assert not seen.threads, f"left behind: {seen.threads}"
        assert outcome.exit_code == 0


def test_a_rank_that_comes_too_late_is_told_so(outcomes: dict) -> None:
    late = outcomes[one_misbehaves, "average", "qsgd", "stall", 0][0].value
    assert late.kind == "PeerError"
    assert "one came later than the timeout, perhaps this one" in late.error


# -- the store ---------------------------------------------------------------------------------------------


def store_host_gone(worker: Worker, how: str) -> tuple[Caught | None, int]:
    """As with torchrun's default or `tcp://`: rank 0 keeps the store."""
    loaded_together(worker, "topk(ratio=0.1)")
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(worker.size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    port = torch.zeros(1, dtype=torch.int64)
    if worker.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast(port, 0)
    if worker.rank != 0:
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=store, rank=worker.rank, world_size=worker.size, timeout=timedelta(seconds=TIMEOUT)
    )
    step, detach = ddp_step(worker, "topk(ratio=0.1)", True)
    for number in range(BAD_STEP):
        step(number)
    if worker.rank == 0:
        if how == "die":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGSTOP)
    seen = caught(lambda: step(BAD_STEP), detach)
    if how == "stop" and worker.rank == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pids[0]), signal.SIGCONT)
    return seen


@pytest.mark.parametrize("how", ["die", "stop"])
def test_the_host_of_the_store_dies_or_stops(how: str, outcomes: dict) -> None:
    """Nobody can be asked then; the error says that, and comes in time all the same."""
    _, survivor = outcomes[store_host_gone, how]
    seen: Caught = survivor.value
    assert seen is not None, survivor
    assert seen.kind == "PeerError"
    assert "the rendezvous store does not answer: its host (usually rank 0) is gone" in seen.error
    assert "failed on rank 1" in seen.error
    assert seen.seconds < TIMEOUT + GRACE_SECONDS + SLACK
    assert survivor.exit_code == 0


def nobody_catches(worker: Worker) -> None:
    loaded_together(worker, "topk(ratio=0.1)")
    step, _ = ddp_step(worker, "topk(ratio=0.1)", True)
    for number in range(BAD_STEP):
        step(number)
    if worker.rank == 1:
        os._exit(7)
    step(BAD_STEP)


def test_a_program_that_does_not_catch_the_error_ends(outcomes: dict) -> None:
    """With lanes still there and nothing detached."""
    first, second = outcomes[nobody_catches,]
    assert (first.exit_code, second.exit_code) == (1, 7)
    assert "PeerError: all_gather of step 3 failed on rank 0: no word from rank 1" in first.error


# -- other ways to go missing ------------------------------------------------------------------------------


def never_attaches(worker: Worker) -> Caught | None:
    model = wrap(mlp())
    if worker.rank == 1:
        with pytest.raises(thinwire.ConfigError):
            thinwire.attach(model, "tpok")
        return None
    return caught(lambda: thinwire.attach(model, "topk"), lambda: None)


def test_a_rank_that_never_attaches_is_named(outcomes: dict) -> None:
    first, second = outcomes[never_attaches,]
    seen: Caught = first.value
    assert seen is not None, first
    assert seen.kind == "PeerError"
    assert "attach failed on rank 0: no word from rank 1" in seen.error
    assert seen.seconds < TIMEOUT + SLACK
    assert (first.exit_code, second.exit_code) == (0, 0)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(50, 40, sparse=True), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(x))


def sparse_gradient(worker: Worker) -> Caught | None:
    loaded_together(worker, "topk(ratio=0.1)")
    model = wrap(Lookup())
    session = thinwire.attach(model, "topk(ratio=0.1)")
    indices = torch.tensor([1, 2, worker.rank])
    return caught(lambda: model(indices).square().mean().backward(), session.detach)


def hook_raises_on_one_rank(worker: Worker) -> Caught | None:
    loaded_together(worker, "topk(ratio=0.1)")
    model = wrap(mlp())
    session = thinwire.attach(model, "topk(ratio=0.1)")
    square_loss(model, worker.rank, 0).backward()
    if worker.rank == 1:
        model.module[0].weight.register_hook(_interrupt)
    return caught(lambda: square_loss(model, worker.rank, 1).backward(), session.detach)


def _interrupt(grad: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a bug in the model")


def test_a_sparse_gradient_is_refused_on_every_rank(outcomes: dict) -> None:
    for outcome in outcomes[sparse_gradient,]:
        seen: Caught = outcome.value
        assert seen is not None, outcome
        assert "construct the layer with sparse=False" in seen.error
        assert seen.kind == "ThinwireError"
        assert not seen.threads
        assert outcome.exit_code == 0


def test_a_backward_pass_that_breaks_off_on_one_rank_does_not_hang_the_other(outcomes: dict) -> None:
    first, second = outcomes[hook_raises_on_one_rank,]
    assert first.value.kind == "PeerError", first
    assert "of step 1 failed on rank 0" in first.value.error
    assert first.value.seconds < TIMEOUT + GRACE_SECONDS + SLACK
    assert "a bug in the model" in second.value.error
    for outcome in (first, second):
        assert not outcome.value.threads
        assert outcome.exit_code == 0


# -- all of it ---------------------------------------------------------------------------------------------

# A function for the workers and its arguments. The longest come first.
RUNS = (
    *((one_misbehaves, *case) for case in sorted(CASES, key=lambda case: (case[2] != "stall", case))),
    *((store_host_gone, how) for how in ("die", "stop")),
    *((function,) for function in (never_attaches, hook_raises_on_one_rank, nobody_catches, sparse_gradient)),
)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple, list[Outcome]]:
    """All runs, several at a time: they spend their time waiting."""

    def run(given: tuple) -> tuple[tuple, list[Outcome]]:
        function, *arguments = given
        workers = 3 if function is one_misbehaves else 2
        return given, start_local(function, workers, *arguments, timeout=400, group_timeout=TIMEOUT)

    with ThreadPoolExecutor(5) as pool:
        return dict(pool.map(run, RUNS))
