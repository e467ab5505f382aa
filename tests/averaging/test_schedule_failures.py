"""A failure at any operation leaves every state of a schedule as it was, and what failed can be repeated."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.averaging.cohort import CONFIGURATIONS, Cohort, equal, normed
from tests.laws.cohort import memory, same_state
from tests.laws.failing import Failing
from thinwire import DisagreementError, parse
from thinwire.core.channel import Program
from thinwire.sessions.periodic import PeriodicSession

SIZE = 4
STEPS = 7
SHORT = [m for m in CONFIGURATIONS if parse(m).period <= 8 and parse(m).warmup <= STEPS]
WARMING_UP = [method for method in CONFIGURATIONS if parse(method).gradient_warmup]


@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_a_sync_round_that_failed_can_be_repeated(method: str) -> None:
    """With the same result, to the last bit, whatever has failed before."""
    cohort, untouched = trained(method, STEPS), trained(method, STEPS)
    untouched.sync()
    assert untouched.driver.operations > 0
    for at, told in itertools.product(range(untouched.driver.operations), (True, False)):
        check_failure(cohort, PeriodicSession.sync_program, at, told)
    cohort.sync()
    check_equal(cohort, untouched)
    for each in (cohort, untouched):
        assert all(equal(model, each.models[0]) for model in each.models[1:])
        each.train(range(STEPS, STEPS + 6))
    check_equal(cohort, untouched)


@pytest.mark.parametrize("method", SHORT)
def test_training_goes_on_after_sync_rounds_that_failed(method: str) -> None:
    """Those that were due failed at one operation or another; the next ones are as good as ever."""
    cohort, step = trained(method, STEPS), STEPS
    for at, told in ((0, True), (1, False), (1, True)):
        step = until_due(cohort, step)
        check_failure(cohort, PeriodicSession.advance, at, told)
    session = cohort.sessions[0]
    rounds = session.sync_rounds
    cohort.train(range(step, step + 2 * session.clock.steps))
    assert session.sync_rounds >= rounds + session.method.fragment_count
    assert session.aborted == 0
    cohort.sync()
    assert all(equal(model, cohort.models[0]) for model in cohort.models[1:])


def test_after_a_failure_the_ranks_compare_their_common_models_again() -> None:
    """As in the first sync round after a load, which may be the one that failed."""
    cohort = trained("localsgd(every=3)", STEPS)
    assert cohort.sessions[0].sync_rounds == 2
    for session in cohort.sessions:
        session.load_state_dict(session.state_dict())
    check_failure(cohort, PeriodicSession.sync_program, 0, told=True)
    cohort.sessions[1].blocks[0].anchor[3] += 1
    with pytest.raises(DisagreementError, match="last common models"):
        cohort.sync()


@pytest.mark.parametrize("method", WARMING_UP)
def test_a_step_of_the_warm_up_that_failed_can_be_repeated(method: str) -> None:
    cohort, untouched = trained(method, 2), trained(method, 2)
    for each in (cohort, untouched):
        for rank in range(SIZE):
            each.backward(rank, 2)
    untouched.average_gradients()
    assert untouched.driver.operations > 0
    for at, told in itertools.product(range(untouched.driver.operations), (True, False)):
        check_failure(cohort, PeriodicSession.gradient_program, at, told)
    cohort.average_gradients()
    for each in (cohort, untouched):
        for optimizer in each.optimizers:
            optimizer.step()
        each.advance()
        each.train(range(3, 8))
    check_equal(cohort, untouched)


def trained(method: str, steps: int) -> Cohort:
    cohort = Cohort(method, SIZE, make=normed, driver=Failing(SIZE))
    for rank, model in enumerate(cohort.models):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient, rank=rank: with_gaps(gradient, rank))
    cohort.train(range(steps))
    return cohort


def until_due(cohort: Cohort, step: int) -> int:
    """Take steps until a sync round is due, which has not begun."""
    while True:
        for rank in range(SIZE):
            cohort.local_step(rank, step)
        step += 1
        if copy.deepcopy(cohort.sessions[0].clock).tick()[0]:
            return step
        cohort.advance()


def with_gaps(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """Some entries are zero in all steps on all ranks, as those of rare words, and some on one rank only."""
    gradient = gradient.clone()
    gradient.view(-1)[::5] = 0
    if rank == 1:
        gradient.view(-1)[1::5] = 0
    return gradient


def state(session: PeriodicSession) -> dict[str, Any]:
    """All that is saved, and the gradients; without the count of bytes and without the exchange's number of
    the sync round, which is set before each use."""
    found: dict[str, Any] = memory(session)
    del found["engine"]["counters"], found["engine"]["step"]
    return found | {"gradients": [p.grad for p in session.parameters.values()]}


def check_failure(
    cohort: Cohort, begin: Callable[[PeriodicSession], Program | None], at: int, told: bool
) -> None:
    """What is begun fails: then only the optimizer's steps have been counted, and earlier results applied."""
    driver = cohort.driver
    before = [(session.sync_rounds, session.clock.synced) for session in cohort.sessions]
    programs = [begin(session) for session in cohort.sessions]
    expected = [state(session) for session in cohort.sessions]
    for kept, (sync_rounds, synced) in zip(expected, before, strict=True):
        kept["sync_rounds"], kept["clock"]["synced"] = sync_rounds, synced
    driver.at, driver.told = at, told
    with pytest.raises(ConnectionError, match="a test"):
        driver.run(programs)
    driver.at = None
    for rank, (kept, session) in enumerate(zip(expected, cohort.sessions, strict=True)):
        now = state(session)
        changed = [name for name in kept if not same_state(kept[name], now[name])]
        assert not changed, f"rank {rank}, operation {at}, told: {told}: {changed}"


def check_equal(cohort: Cohort, untouched: Cohort) -> None:
    for one, other in zip(cohort.models, untouched.models, strict=True):
        assert equal(one, other)
    for one, other in zip(cohort.sessions, untouched.sessions, strict=True):
        assert same_state(state(one), state(other))
