"""The same coroutines in real processes over gloo: training, faults, restarts. One launch, many scenarios."""

import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from tests.server.common import EASY, optimum, problem
from thinwire.net.launch import Worker, run_local, start_local
from thinwire.net.store import default_store
from thinwire.server import AsyLPG, asylpg, serve, work

LINEAR = {**EASY, "epochs": 8, "mode": "centered"}
TIMEOUT = 10.0


class Crash(BaseException):
    """Ends a worker like a kill would: nobody is told."""


class Spoiled:
    """The easy problem, with something that happens before its n-th difference."""

    def __init__(self, at: int, happen) -> None:
        self._inner, self._at, self._happen, self._count = problem(), at, happen, 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def difference(self, x, snapshot, rows):
        self._count += 1
        if self._count == self._at:
            self._happen()
        return self._inner.difference(x, snapshot, rows)


def crash():
    raise Crash


def caught(function, *kinds):
    """What the call raised, in words, and after how many seconds."""
    begin = time.monotonic()
    try:
        function()
    except kinds as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None


def told(result):
    return {
        "objective": result.objective,
        "staleness": result.staleness.tolist(),
        "updates": result.updates,
        "lost": result.lost,
        "epochs": [record.epoch for record in result.history],
    }


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def train_a_module(worker: Worker):
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 8, generator=rng)
    targets = (inputs[:, :1] * inputs[:, 1:2]).tanh()
    model = network()

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    options = {"mode": "centered", "bits_up": 8, "lr": 0.1, "epochs": 6, "epoch_length": 150}
    result = asylpg(model, loss, (inputs, targets), shards=2, name="module", **options)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return flat.numpy(), [record.objective for record in result.history]


def sleep_at_random(worker: Worker):
    """Staleness over a real network, with workers that pause."""
    rng = np.random.default_rng(worker.rank)
    pausing = Spoiled(0, None)
    inner = pausing._inner.difference

    def difference(x, snapshot, rows):
        if rng.random() < 0.1:
            time.sleep(0.004 * worker.rank)
        return inner(x, snapshot, rows)

    pausing.difference = difference
    options = {**LINEAR, "epochs": 3, "epoch_length": 300, "max_staleness": 3}
    return told(asylpg(pausing, name="sleep", **options))


def come_back(worker: Worker):
    """Worker 2 crashes and joins again while the others go on."""
    options = AsyLPG(**LINEAR)
    if worker.rank == 0:
        return told(serve(problem(), options, workers=3, name="back"))
    join = {"index": worker.rank - 1, "workers": 3, "name": "back"}
    if worker.rank < 3:
        slow = Spoiled(0, None)
        inner = slow._inner.difference
        slow.difference = lambda *args: (time.sleep(0.0005), inner(*args))[1]
        return work(slow, options, **join).updates
    crashed = caught(lambda: work(Spoiled(40, crash), options, **join), Crash)
    return crashed[0], work(problem(), options, **join).updates


def alone(worker: Worker):
    """The only worker crashes, and joins again after its connection was seen to break."""
    options = AsyLPG(**LINEAR)
    if worker.rank == 0:
        return told(serve(problem(), options, workers=1, name="alone"))
    if worker.rank > 1:
        return None
    join = {"index": 0, "workers": 1, "name": "alone"}
    crashed = caught(lambda: work(Spoiled(40, crash), options, **join), Crash)
    time.sleep(2.0)
    return crashed[0], work(problem(), options, **join).updates


def resume(worker: Worker, file: str):
    """The server ends in its fourth epoch; all begin anew and it goes on from its checkpoint."""
    options = AsyLPG(**LINEAR)

    def stop(record):
        if record.epoch == 3:
            raise RuntimeError("pulled the plug")

    if worker.rank == 0:
        run = {"workers": 3, "name": "resume", "checkpoint": file}
        first = caught(
            lambda: serve(problem(), options, on_epoch=stop, checkpoint_every=100, **run),
            RuntimeError,
        )
        return first, told(serve(problem(), options, resume=True, **run))
    join = {"index": worker.rank - 1, "workers": 3, "name": "resume"}
    first = caught(lambda: work(problem(), options, **join), thinwire.ThinwireError)
    return first, work(problem(), options, **join).updates


def disagree(worker: Worker):
    """Worker 2 has other options: it is refused, the others begin without it."""
    dist.barrier()  # the server waits so long for all: nobody may still be busy with something else
    options = {**LINEAR, "bits_up": 8 if worker.rank == 3 else 4}
    run = lambda: asylpg(problem(), name="disagree", timeout=TIMEOUT, **options)  # noqa: E731
    return caught(run, thinwire.DisagreementError) if worker.rank == 3 else told(run())


def too_few(worker: Worker):
    """Two of three workers are wanted, one joins."""
    options = AsyLPG(**LINEAR)
    dist.barrier()  # the server must not wait while the worker is still busy with something else
    if worker.rank == 0:
        run = {"workers": 3, "min_workers": 2, "name": "few", "timeout": TIMEOUT}
        return caught(lambda: serve(problem(), options, **run), thinwire.PeerError)
    if worker.rank == 1:
        join = {"index": 0, "workers": 3, "name": "few"}
        return caught(lambda: work(problem(), options, **join), thinwire.ThinwireError)
    return None


def bad_loss(worker: Worker):
    """An error of the user's own loss reaches everyone."""

    def fail():
        raise ValueError("no such label")

    spoiled = Spoiled(50 if worker.rank == 2 else 0, fail)
    run = lambda: asylpg(spoiled, name="bad", **LINEAR)  # noqa: E731
    return caught(run, thinwire.ThinwireError, ValueError)


def diverge(worker: Worker):
    options = {**LINEAR, "lr": 1e200, "prox": "none", "strength": 0.0}
    run = lambda: asylpg(problem(), name="diverge", **options)  # noqa: E731
    return caught(run, thinwire.ThinwireError)


def no_server(worker: Worker):
    options = AsyLPG(**LINEAR)
    run = lambda: work(problem(), options, index=0, workers=3, name="nobody", timeout=0.5)  # noqa: E731
    return caught(run, thinwire.PeerError)


def scenarios(worker: Worker, file: str):
    return {
        "module": train_a_module(worker),
        "sleep": sleep_at_random(worker),
        "back": come_back(worker),
        "alone": alone(worker),
        "resume": resume(worker, file),
        "disagree": disagree(worker),
        "few": too_few(worker),
        "bad": bad_loss(worker),
        "diverge": diverge(worker),
        "nobody": no_server(worker),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the four ranks saw in all scenarios."""
    file = str(tmp_path_factory.mktemp("asylpg") / "state")
    return run_local(scenarios, 4, file, timeout=400)


def test_a_module_is_trained_on_all_ranks_alike(outcomes):
    parameters = [outcome["module"][0] for outcome in outcomes]
    assert all(np.array_equal(other, parameters[0]) for other in parameters)
    objectives = outcomes[0]["module"][1]
    assert objectives[-1] < 0.5 * objectives[0]


def test_staleness_over_the_network_stays_within_its_bound(outcomes):
    found = outcomes[0]["sleep"]
    assert len(found["staleness"]) == 4
    assert sum(found["staleness"]) == found["updates"] == 900
    assert sum(found["staleness"][1:]) > 100, "hardly anything was stale: this run shows nothing"


def test_a_crashed_worker_is_noticed_and_comes_back(outcomes):
    server, *workers = (outcome["back"] for outcome in outcomes)
    assert len(server["lost"]) == 1
    assert server["lost"][0].startswith("worker 2")
    assert server["objective"] - optimum() < 1e-8
    assert workers[2][0] == "Crash"
    assert min(workers[0], workers[1], workers[2][1]) > 0


def test_the_last_worker_may_come_back(outcomes):
    server, (crashed, updates) = outcomes[0]["alone"], outcomes[1]["alone"]
    assert crashed == "Crash"
    assert len(server["lost"]) == 1
    assert server["updates"] == LINEAR["epochs"] * EASY["epoch_length"]
    assert server["updates"] - 40 <= updates < server["updates"]
    assert server["objective"] - optimum() < 1e-8


def test_the_server_goes_on_from_its_checkpoint(outcomes):
    (kind, text, _), server = outcomes[0]["resume"]
    assert (kind, text) == ("RuntimeError", "pulled the plug")
    assert server["epochs"] == list(range(LINEAR["epochs"] + 1))
    assert server["objective"] - optimum() < 1e-8
    done = 0
    for outcome in outcomes[1:]:
        (_, text, _), updates = outcome["resume"]
        assert "pulled the plug" in text
        done += updates
    # It was stopped at epoch 3 before that was written: the last file is of update 1500 or little before.
    assert 5 * EASY["epoch_length"] <= done <= 5 * EASY["epoch_length"] + 110


def test_a_worker_with_other_options_is_refused_and_the_rest_goes_on(outcomes):
    kind, text, _ = outcomes[3]["disagree"]
    assert kind == "DisagreementError"
    assert "bits_up=8" in text
    assert outcomes[0]["disagree"]["objective"] - optimum() < 1e-8


def test_too_few_workers_are_an_error_on_all_sides(outcomes):
    assert "only 1 of 3 workers joined" in outcomes[0]["few"][1]
    assert "only 1 of 3 workers joined" in outcomes[1]["few"][1]


def test_an_error_in_the_loss_reaches_everyone(outcomes):
    for rank, outcome in enumerate(outcomes):
        kind, text, _ = outcome["bad"]
        assert "no such label" in text
        assert kind == ("ValueError" if rank == 2 else "ThinwireError")


def test_a_run_that_diverges_says_so_everywhere(outcomes):
    for outcome in outcomes:
        assert "lower lr" in outcome["diverge"][1]


def test_a_worker_without_a_server_does_not_wait_for_ever(outcomes):
    _, text, seconds = outcomes[1]["nobody"]
    assert "finds no server of shard 0" in text
    assert seconds < 60  # half a second by its own timeout; torch may look a name up in vain meanwhile


def killed_worker(worker: Worker):
    leave = Spoiled(60, lambda: os._exit(7)) if worker.rank == 2 else problem()
    return told(asylpg(leave, **LINEAR))


def test_the_others_go_on_when_a_worker_is_killed():
    outcomes = start_local(killed_worker, 4, timeout=400)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 7, 0]
    server = outcomes[0].value
    assert len(server["lost"]) == 1
    assert "worker 1" in server["lost"][0]
    assert server["objective"] - optimum() < 1e-8


def stopped_worker(worker: Worker):
    """Alive but silent: given up after the timeout."""
    store = default_store()

    def stop():
        store.set("silent", "")
        time.sleep(3 * TIMEOUT)

    silent = Spoiled(60, stop) if worker.rank == 2 else problem()
    run = lambda: told(asylpg(silent, timeout=2.0, **LINEAR))  # noqa: E731
    return caught(run, thinwire.ThinwireError) if worker.rank == 2 else run()


@pytest.mark.slow
def test_a_silent_worker_is_given_up():
    server, _, silent, _ = run_local(stopped_worker, 4, timeout=400)
    assert len(server["lost"]) == 1
    assert server["objective"] - optimum() < 1e-8
    assert silent is not None


def dying_server(worker: Worker, way: str):
    store = default_store()

    def die(record):
        if record.epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL if way == "killed" else signal.SIGSTOP)

    if worker.rank == 0:
        store.set("server", str(os.getpid()))
        asylpg(problem(), on_epoch=die, timeout=TIMEOUT, **LINEAR)
    found = caught(lambda: asylpg(problem(), timeout=TIMEOUT, **LINEAR), thinwire.PeerError)
    store.add("raised", 1)
    if worker.rank == 1:
        while store.add("raised", 0) < 2:
            time.sleep(0.05)
        if way == "stopped":
            os.kill(int(store.get("server")), signal.SIGKILL)
    return found


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_server_that_dies_ends_all_workers_in_time(way):
    outcomes = start_local(dying_server, 3, way, timeout=400)
    for outcome in outcomes[1:]:
        kind, text, seconds = outcome.value
        assert kind == "PeerError"
        assert "lost the server of shard 0" in text
        assert seconds < TIMEOUT + 60  # with the time until it died, on a loaded machine
