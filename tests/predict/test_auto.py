"""attach(model, "auto"): measures, decides once and for all ranks, and goes on with what it chose."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.hosts.common import flat
from thinwire.core.optimizers import Optimizers
from thinwire.hosts import auto
from thinwire.net.costs import Link
from thinwire.net.launch import Worker, WorkerFailedError, run_local
from thinwire.net.rank_info import RankInfo
from thinwire.predict import language
from thinwire.predict import probe as probing
from thinwire.predict import recommend as planning

WIDTH = 200
# Every candidate's kernels are loaded where rank 0 plans: these do.
FEW = ("dense", "fp16", "qsgd(bits=4)")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def start(link: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer, auto.AutoSession]:
    auto.CANDIDATES = FEW
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = thinwire.attach(model, "auto", optimizer=optimizer)
    assert isinstance(session, auto.AutoSession)
    session.throttle(link)
    return model, optimizer, session


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    rng = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=rng)).square().mean().backward()
        optimizer.step()


def decide(worker: Worker, link: str) -> dict[str, object]:
    probing.LONG_ENOUGH = 0.6  # a busy machine delays a message, hardly the time of many
    model, optimizer, session = start(link)
    train(model, optimizer, worker.rank, auto.STEPS)
    before = str(session.method)
    dense_bytes = session.meter.sent_bytes
    with torch.no_grad():
        model(torch.zeros(1, WIDTH))  # an evaluation on the way decides nothing
    undecided = not session.decided
    train(model, optimizer, worker.rank, 3)
    result = {
        "before": before,
        "undecided": undecided,
        "method": str(session.method),
        "decided": session.decided,
        "reasons": session.reasons,
        "kept bytes": session.meter.sent_bytes > dense_bytes > 0,
        "steps": session.meter.steps,
        "parameters": flat(model),
        "link": session.link,
    }
    session.detach()
    return result


def test_a_slow_link_gets_a_method_on_all_ranks_alike() -> None:
    ranks = run_local(decide, 2, "20mbit", timeout=400)
    first = ranks[0]
    assert (first["before"], first["undecided"], first["decided"]) == ("dense", True, True)
    assert first["method"] in FEW[1:]
    assert set(FEW) <= set(auto.CANDIDATES)
    assert thinwire.parse(first["method"]).traits.consensus
    assert first["kept bytes"]
    assert first["steps"] == auto.STEPS + 3
    assert first["link"].bandwidth == pytest.approx(20e6 / 8, rel=0.3)
    for other in ranks[1:]:
        assert (other["method"], other["reasons"]) == (first["method"], first["reasons"])
        assert torch.equal(other["parameters"], first["parameters"])


ADAM = "adam(exchange=efsign(bucket=4096), warmup=4)"


def with_adamw(worker: Worker) -> tuple[str, torch.Tensor, bool]:
    """Our table recommends adam: its warm-up begins where auto has decided. The optimizer is a fused one."""
    auto.CANDIDATES = ("dense", "topk(ratio=0.01)")
    language.behind = lambda: {"dense": 0.0, str(thinwire.parse(ADAM)): 0.0}
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, fused=True)
    session = thinwire.attach(model, "auto", optimizer=optimizer)
    session.throttle("20mbit")
    train(model, optimizer, worker.rank, auto.STEPS + 5)
    second = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
    train(model, optimizer, worker.rank, 3)
    states = zip(second, optimizer.state.values(), strict=True)
    frozen = all(torch.equal(before, now["exp_avg_sq"]) for before, now in states)
    session.detach()
    return str(session.method), flat(model), frozen


def test_with_adamw_it_may_choose_adam() -> None:
    (first, parameters, frozen), (second, others, _) = run_local(with_adamw, 2, timeout=400)
    assert first == second == str(thinwire.parse(ADAM))
    assert torch.equal(parameters, others)
    assert frozen


def resume(worker: Worker, folder: str) -> tuple[str, bool, bool, str]:
    model, optimizer, session = start("20mbit")
    train(model, optimizer, worker.rank, 2)
    early = session.sealed()["decided"]
    train(model, optimizer, worker.rank, auto.STEPS)
    chosen, weights = str(session.method), {k: v.clone() for k, v in model.state_dict().items()}
    file = f"{folder}/rank{worker.rank}.pt"
    torch.save(session.state_dict(), file)
    train(model, optimizer, worker.rank, 2)
    straight = flat(model)
    session.detach()
    model, optimizer, session = start("none")
    model.load_state_dict(weights)
    session.load_state_dict(torch.load(file, weights_only=True))
    again = str(session.method)
    train(model, optimizer, worker.rank, 2)
    same = torch.equal(flat(model), straight)
    session.detach()
    return chosen, early, same, again


def test_a_checkpoint_keeps_the_choice_and_a_resumed_run_does_not_ask_again(tmp_path) -> None:
    for chosen, early, same, again in run_local(resume, 2, str(tmp_path), timeout=400):
        assert chosen != "dense"
        assert again == chosen
        assert early is False
        assert same


def alone(worker: Worker) -> tuple[str, bool]:
    model, optimizer, session = start("none")
    train(model, optimizer, 0, 2)
    session.detach()
    return str(session.method), session.decided


def test_one_rank_alone_stays_dense() -> None:
    assert run_local(alone, 1, timeout=400) == [("dense", True)]


def rank_0_fails(worker: Worker) -> None:
    model, optimizer, _ = start("none")
    auto.CANDIDATES = ("no_such_method",)  # type: ignore[misc]
    train(model, optimizer, worker.rank, auto.STEPS + 1)


def test_a_failure_of_rank_0_is_heard_by_all() -> None:
    with pytest.raises(WorkerFailedError) as raised:
        run_local(rank_0_fails, 2, timeout=400)
    text = str(raised.value)
    assert text.count("ThinwireError: auto: rank 0 could not plan: ConfigError: unknown method") == 2


def test_a_bare_model_is_refused() -> None:
    with pytest.raises(
        thinwire.ConfigError, match=r"a bare model \(Linear\).*of a DistributedDataParallel model: wrap"
    ):
        thinwire.attach(nn.Linear(2, 2), "auto")


def refused(worker: Worker) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for nothing in (None, [], ()):
        with pytest.raises(thinwire.ConfigError) as raised:
            thinwire.attach(model, "auto", optimizer=nothing)
        assert 'write attach(model, "auto", optimizer=optimizer)' in str(raised.value)
        assert "qsgd(bits=4)" in str(raised.value)
    with pytest.raises(thinwire.ConfigError, match=r"replicas.*'some'"):
        thinwire.attach(model, "auto", optimizer=optimizer, replicas="some")
    with pytest.raises(thinwire.ConfigError, match=r"replicas is not for dense.*it is for the method auto"):
        thinwire.attach(model, "dense", optimizer=optimizer, replicas="equal")
    thinwire.attach(model, "auto", optimizer=optimizer).detach()


def test_the_optimizer_is_needed_and_replicas_is_for_auto_only() -> None:
    """Without it SGD would be taken for granted: what it suits may be worse than no exchange at all."""
    run_local(refused, 2, timeout=400)


# -- schedules, and a link that changes ----------------------------------------------------------------

SCHEDULE, SHORT = (str(thinwire.parse(f"pqasgd(every={every}, bits=4)")) for every in (4, 2))


def with_a_schedule(
    rank: int, replicas: str | None = None
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, auto.AutoSession]:
    """Two steps after `auto` has chosen, by a table in which the schedule is as good as dense."""
    auto.CANDIDATES = ("dense", "fp16")
    language.behind = lambda: {"dense": 0.0, "fp16": 0.0, SCHEDULE: 0.0}
    language.recovered = lambda: {"fp16": 1.0, SCHEDULE: 0.9}
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    session = thinwire.attach(model, "auto", optimizer=optimizer, replicas=replicas)
    assert isinstance(session, auto.AutoSession)
    session.throttle("20mbit")
    train(model, optimizer, rank, auto.STEPS + 2)
    return model, optimizer, session


def with_table(worker: Worker, replicas: str | None) -> dict[str, object]:
    """AdamW, and a table in which the schedule is as good as dense."""
    model, optimizer, session = with_a_schedule(worker.rank, replicas)
    between = session.spread()
    saved = session.state_dict()
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    moments = optimizer.state_dict()
    train(model, optimizer, worker.rank, 3)
    straight = flat(model)
    every = session.reconcile_every
    if every is not None:
        session.reconcile()
    result = {
        "method": str(session.method),
        "between": between,
        "every": every,
        "after": session.spread(),
        "steps": session.meter.steps,
    }
    session.detach()
    # A new run continues with the same method from there.
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    session = thinwire.attach(model, "auto", optimizer=optimizer, replicas=replicas)
    session.load_state_dict(saved)
    result["again"] = str(session.method)
    rng = torch.Generator().manual_seed(worker.rank)
    for _ in range(2):
        torch.randn(4, WIDTH, generator=rng)
    train(model, optimizer, worker.rank, 3)
    result["same"] = torch.equal(flat(model), straight)
    session.detach()
    return result


def with_checkpointer(worker: Worker, folder: str) -> dict[str, object]:
    """Replicas that differ are saved between two sync rounds, each by its rank, and continued."""
    model, optimizer, session = with_a_schedule(worker.rank)
    result: dict[str, object] = {"between": session.spread()}
    checkpointer = thinwire.Checkpointer(folder, session, model, optimizer, every=7)
    for _ in range(7):
        checkpointer.step()
    checkpointer.wait()
    train(model, optimizer, worker.rank, 3)
    straight = flat(model)
    session.detach()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    session = thinwire.attach(model, "auto", optimizer=optimizer)
    result["step"] = thinwire.Checkpointer(folder, session, model, optimizer).load_latest()
    result["method"], result["differs"] = str(session.method), session.spread()
    train(model, optimizer, worker.rank, 3)
    result["same"] = torch.equal(flat(model), straight)
    session.detach()
    return result


def test_a_checkpointer_continues_an_automatic_schedule_bit_for_bit(tmp_path: Path) -> None:
    for rank in run_local(with_checkpointer, 2, str(tmp_path), timeout=400):
        assert rank["method"] == SCHEDULE
        assert rank["between"] > 0, "saved between two sync rounds"
        assert rank["differs"] == rank["between"]
        assert rank["step"] == 7
        assert rank["same"]


def test_auto_may_choose_periodic_averaging_and_its_checkpoint_continues() -> None:
    first, second = run_local(with_table, 2, None, timeout=400)
    assert first["method"] == second["method"] == SCHEDULE
    assert first["between"] > 0, "replicas differ between sync rounds"
    assert first["after"] == 0
    assert first["every"] == 4
    assert first["steps"] == auto.STEPS + 5
    assert first["again"] == second["again"] == SCHEDULE
    assert first["same"]
    assert second["same"]


def test_equal_replicas_leave_periodic_averaging_out() -> None:
    first, second = run_local(with_table, 2, "equal", timeout=400)
    assert first["method"] == second["method"] == "fp16"
    assert (first["between"], first["every"], first["again"]) == (0, None, "fp16")


class Slowly(nn.Module):
    """Computes for a while, on no core: so what a busy machine does to a step hardly counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.4)
        return x


def changing(worker: Worker, first: str, then: str, slow: str) -> dict[str, object]:
    """Train on one link until the choice is made, then on another one."""
    auto.CHECK_EVERY, auto.LEAST_CYCLES = 6, 1
    probing.SMALL_TIMES = probing.BUSY_TIMES = 4
    auto.WORTH_A_SWITCH = 0.0  # on a fast link two methods hardly differ: what is recommended is taken
    auto.CANDIDATES = ("dense", "topk(ratio=0.01)")
    if slow == SHORT:
        auto.CANDIDATES = ("dense",)
        language.behind = lambda: {"dense": 0.0, SHORT: 0.0}
        language.recovered = lambda: {SHORT: 0.9}
    model = DistributedDataParallel(nn.Sequential(Slowly(), network()))
    kind = torch.optim.AdamW if slow == SHORT else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.005)
    session = thinwire.attach(model, "auto", optimizer=optimizer)
    assert isinstance(session, auto.AutoSession)
    session.throttle(first)
    train(model, optimizer, worker.rank, auto.STEPS + 3)
    chosen = str(session.method)
    session.throttle(then)
    train(model, optimizer, worker.rank, 3 * 6 + 6)
    if session.reconcile_every is not None:
        session.reconcile()
    result = {
        "chosen": chosen,
        "then": str(session.method),
        "parameters": flat(model),
        "moments": [
            each.clone()
            for state in optimizer.state.values()
            for each in state.values()
            if isinstance(each, torch.Tensor)
        ],
        "steps": session.meter.steps,
    }
    session.detach()
    return result


SLOW, FAST = "10mbit,latency=150ms", "none"


@pytest.mark.parametrize(
    ("first", "then", "chosen", "later"),
    [
        (FAST, SLOW, "dense", "topk(ratio=0.01)"),
        (SLOW, FAST, SHORT, "dense"),
        pytest.param(SLOW, FAST, "topk(ratio=0.01)", "dense", marks=pytest.mark.slow),
        pytest.param(FAST, SLOW, "dense", SHORT, marks=pytest.mark.slow),
    ],
)
def test_when_the_link_changes_another_method_is_taken(
    first: str, then: str, chosen: str, later: str
) -> None:
    slow = chosen if first == SLOW else later
    ranks = run_local(changing, 2, first, then, slow, timeout=400)
    for each in ranks:
        assert (each["chosen"], each["then"]) == (chosen, later)
        assert each["steps"] == auto.STEPS + 3 + 24
        assert torch.equal(each["parameters"], ranks[0]["parameters"])
    if later == "dense":
        pairs = zip(*(each["moments"] for each in ranks), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), "optimizers are equal as well"


def test_replicas_is_for_auto_only() -> None:
    optimizer = torch.optim.SGD((model := nn.Linear(2, 2)).parameters())
    with pytest.raises(thinwire.ConfigError, match="it is for the method auto"):
        thinwire.attach(model, "localsgd", optimizer=optimizer, replicas="equal")


def plan_of(now: str | None, times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> str:
    """What rank 0 chooses if steps take that long, and the last method is recommended."""
    *_, best = times
    rows = [SimpleNamespace(method=method, step_seconds=seconds) for method, seconds in times.items()]
    made = planning.Plan(tuple(rows), best, ("because",), 1, 2, Link(), 0.0)
    monkeypatch.setattr(planning, "make_plan", lambda *arguments, **options: made)
    session = object.__new__(auto.AutoSession)
    session._options = auto._Options(True, 0, 0, None, Optimizers(), "equal")
    session._parameters, session._model = {}, nn.Linear(2, 2)
    session.link, session._compute, session._overheads = Link(), None, None
    session.session = SimpleNamespace(engine=SimpleNamespace(rank_info=RankInfo(0, 2)))
    said = session._plan(now)
    return said["method"]


def test_only_what_is_a_tenth_faster_replaces_the_method_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of(None, {"dense": 1.0, "fp16": 0.95}, monkeypatch) == "fp16"
    assert plan_of("dense", {"dense": 1.0, "fp16": 0.95}, monkeypatch) == "dense"
    assert plan_of("dense", {"dense": 1.0, "fp16": 0.85}, monkeypatch) == "fp16"
