"""Ranks at different steps, or with different state, do not train on: all raise and say who is where."""

import copy

import pytest
import torch

import thinwire
from tests.hosts.common import loaded_together, mlp, square_loss, wrap
from tests.laws.cohort import CONFIGURATIONS, Cohort, memory, same_state
from thinwire import DisagreementError, parse
from thinwire.core import schema
from thinwire.core.agreement import EVERY
from thinwire.core.exchange import State
from thinwire.net.launch import Worker, start_local

SIZE = 4
COUNTED = [text for text in CONFIGURATIONS if not parse(text).traits.single_mean]


def take(cohort: Cohort, count: int) -> None:
    for step in range(count):
        cohort.average(cohort.inputs(step))


def resumed(method: str, steps: tuple[int, ...], *, after: int = 0) -> Cohort:
    """A new group, of which each rank loads its state of another step; after some steps, if asked for."""
    before = Cohort(method, len(steps), seed=3)
    saved: dict[int, list] = {}
    for step in range(max(steps) + 1):
        saved[step] = [copy.deepcopy(session.sealed()) for session in before.sessions]
        before.average(before.inputs(step))
    cohort = Cohort(method, len(steps), seed=3)
    take(cohort, after)
    for rank, (session, step) in enumerate(zip(cohort.sessions, steps, strict=True)):
        if step:
            session.load_state_dict(saved[step][rank])
    return cohort


# -- in lock-step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", COUNTED)
def test_ranks_that_load_different_steps_are_refused(method: str) -> None:
    """One rank's checkpoint is one step older, as after a kill between two writes.

    Before the first operation, which may depend on the step.
    """
    cohort = resumed(method, (3, 3, 2, 3))
    with pytest.raises(DisagreementError) as caught:
        cohort.average(cohort.inputs(9))
    assert "at different steps (rank 0, 1, 3: step 3; rank 2: step 2)" in str(caught.value)
    assert "load the same generation of the checkpoint on all ranks" in str(caught.value)


MEANS = (
    "powersgd(rank=1)",
    "sketched(momentum=0.0)",
    "a2sgd",
    "randomblock(ratio=0.2)",
    "randomk(ratio=0.1)",
)


@pytest.mark.parametrize("method", MEANS)
@pytest.mark.parametrize("steps", [(0, 2, 2), (1, 2, 3), (2, 0, 0)])
def test_methods_that_only_take_means_name_all_steps(method: str, steps: tuple[int, ...]) -> None:
    """Also if the steps' mean is a rank's own step, or one rank has not loaded anything."""
    cohort = resumed(method, steps)
    with pytest.raises(DisagreementError, match="at different steps") as caught:
        cohort.average(cohort.inputs(9))
    for rank, step in enumerate(steps):
        assert any(
            f"{rank}" in part.partition(":")[0] and f"step {step}" in part
            for part in str(caught.value).partition("(")[2].split(";")
        )


@pytest.mark.parametrize("method", MEANS)
def test_a_load_in_the_middle_is_confirmed_at_once(method: str) -> None:
    cohort = resumed(method, (3, 2, 3), after=2)
    with pytest.raises(DisagreementError, match="rank 0, 2: step 3; rank 1: step 2"):
        cohort.average(cohort.inputs(9))


@pytest.mark.parametrize("method", MEANS)
def test_a_rank_that_goes_astray_later_is_found_within_64_steps(method: str) -> None:
    cohort = Cohort(method, 3, {"wide": (24, 37)})
    take(cohort, 1)
    cohort.sessions[1].engine.step += 1
    with pytest.raises(DisagreementError, match="at different steps"):
        take(cohort, EVERY)
    assert cohort.sessions[0].step == EVERY


def with_replicated_state(method: str) -> bool:
    return any(
        isinstance(live.state, State) and any(t.numel() for t in live.state.tensors("replicated").values())
        for live in made(method).sessions[0].engine.states._live.values()
    )


def made(method: str) -> Cohort:
    cohort = Cohort(method, 3)
    take(cohort, 1)
    return cohort


REPLICATED = [text for text in COUNTED if parse(text).name in ("powersgd", "lag", "laq", "lasg", "slaq")]


@pytest.mark.parametrize("method", REPLICATED)
def test_replicated_state_that_differs_is_refused(method: str) -> None:
    """All at the same step, but one rank's checkpoint comes from another run."""
    cohort, other = made(method), Cohort(method, 3)
    if not with_replicated_state(method):
        pytest.skip("keeps no replicated state")
    other.average(other.inputs(77))
    states = [session.sealed() for session in cohort.sessions]
    foreign = other.sessions[1].sealed()
    fields = type(next(iter(cohort.sessions[1].engine.states._live.values())).state).__dataclass_fields__
    shared = [name for name, field in fields.items() if field.metadata.get("kind") == "replicated"]
    changed = False
    for name, entry in foreign["state"].items():
        for field in shared:
            if field in entry:
                changed |= not states[1]["state"][name][field].equal(entry[field])
                states[1]["state"][name][field] = entry[field]
    if not changed:
        pytest.skip("the replicated state has not changed yet")
    del states[1]["checksums"]
    states[1] = schema.seal(states[1])
    fresh = Cohort(method, 3)
    for session, state in zip(fresh.sessions, states, strict=True):
        session.load_state_dict(state)
    with pytest.raises(
        DisagreementError, match="all at step 1, but state that is equal on all ranks differs"
    ):
        fresh.average(fresh.inputs(5))


@pytest.mark.parametrize("method", ["powersgd(rank=1)", "topk(ratio=0.1)"])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_ranks_go_on_and_only_the_channel_s_own_bytes_grow(method: str, size: int) -> None:
    cohort = Cohort(method, size, {"wide": (24, 37)})
    tallies = []
    for step in range(EVERY + 1):
        before = cohort.driver.meters[0].total
        cohort.average(cohort.inputs(step))
        tallies.append(cohort.driver.meters[0].total.minus(before))
    usual = tallies[1]
    # The first step has a round of its own, which is not counted, a later one none. Frames need no note.
    extra = {EVERY: (0, 256 if method.startswith("powersgd") else 0)}
    for step, tally in enumerate(tallies):
        assert tally.payload_bytes == usual.payload_bytes
        more = (tally.operations - usual.operations, tally.overhead_bytes - usual.overhead_bytes)
        assert more == extra.get(step, (0, 0))


# -- in processes ------------------------------------------------------------------------------------------


def resume_apart(worker: Worker, kind: str) -> tuple[str, str]:
    """Train, keep the states of two steps, and continue with the older one on rank 1."""
    method = {"ddp": "powersgd(rank=1)", "periodic": "localsgd(every=2)", "auto": "auto"}[kind]
    loaded_together(worker, "powersgd(rank=1)")

    def begin():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model = model if kind == "periodic" else wrap(model)
        session = thinwire.attach(model, method, optimizer=optimizer)

        def step(number: int) -> None:
            optimizer.zero_grad()
            square_loss(model, worker.rank, number).backward()
            optimizer.step()

        return session, step

    session, step = begin()
    if kind == "auto":
        session._stop_watching()
        session._switch(parse("powersgd(rank=1)"))
    states = []
    for number in range(8):
        states.append(copy.deepcopy(session.sealed()))
        step(number)
    session.detach()
    session, step = begin()
    session.load_state_dict(states[4 if worker.rank == 1 else 6])
    try:
        for number in range(3):
            step(number)
    except DisagreementError as error:
        session.detach()
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("kind", ["ddp", "periodic", "auto"])
def test_resuming_from_different_steps_is_an_error_on_every_rank(kind: str) -> None:
    for outcome in start_local(resume_apart, 3, kind, timeout=400, group_timeout=60):
        assert outcome.value is not None, outcome
        name, text = outcome.value
        assert name == "DisagreementError"
        assert "rank 1" in text
        assert "every rank" in text or "all ranks" in text


DELAYED = ("topk(ratio=0.2)", "powersgd(rank=1)", "dense")  # reads early, takes copies, has no state


def resume_apart_with_a_delay(worker: Worker, under_ddp: bool) -> dict[str, tuple[int, str, bool]]:
    """Load states of different steps. By method: the step that raises, its error, if all is as before."""
    found = {}
    for method in DELAYED:
        loaded_together(worker, method)

        def begin(method=method):
            module = mlp()
            if under_ddp:
                model = wrap(module)
                return module, model, thinwire.attach(model, method, delay=1)
            return module, module, thinwire.Session(module.named_parameters(), f"delayed(method={method})")

        def step(number: int, module, model, session) -> None:
            module.zero_grad()
            square_loss(model, worker.rank, number).backward()
            if not under_ddp:
                session.average({n: p.grad for n, p in module.named_parameters()}, in_place=True)

        run, states = begin(), []
        for number in range(4):
            states.append(copy.deepcopy(run[-1].sealed()))
            step(number, *run)
        run[-1].detach()
        run = begin()
        session = run[-1]
        session.load_state_dict(states[2 if worker.rank == 1 else 3])
        before = copy.deepcopy(memory(session))
        raised, text = -1, ""
        for number in range(3):
            try:
                step(number, *run)
            except DisagreementError as error:
                raised, text = number, str(error)
                break
        found[method] = raised, text, same_state(before, memory(session))
        session.detach()
    return found


@pytest.mark.parametrize("under_ddp", [True, False])
def test_with_a_delay_the_first_step_raises_and_nothing_is_changed(under_ddp: bool) -> None:
    for outcome in start_local(resume_apart_with_a_delay, 3, under_ddp, timeout=400, group_timeout=60):
        assert outcome.value is not None, outcome
        for method, (step, text, unchanged) in outcome.value.items():
            assert "rank 0, 2: step 3; rank 1: step 2" in text, method
            assert step == 0, f"{method}: raised in step {step}"
            assert unchanged, method
