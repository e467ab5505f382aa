"""A failure at any operation leaves every state as it was, bit for bit, on every rank; so does a lost vote.

A program may be told of the failure, which is thrown into it, or only be closed, as other buckets' are.
"""

import copy

import pytest
import torch

from tests.laws.cohort import CONFIGURATIONS, Cohort, every, is_late, memory, same_state
from tests.laws.failing import Failing
from thinwire import parse
from thinwire.core.channel import Program

SIZE = 4  # one host, one and a half, two or four
BEFORE = 2
DRIFTS = f"a2sgd(average_every={BEFORE})"
EARLY = [method for method in CONFIGURATIONS if parse(method).reads_early]
Tensors = dict[str, torch.Tensor]


def gradients(cohort: Cohort, step: int) -> list[Tensors]:
    """Some entries are zero in all steps on all ranks, as those of rare words, and some on one rank only."""
    inputs = cohort.inputs(step)
    for rank, tensors in enumerate(inputs):
        for tensor in tensors.values():
            if tensor.numel() > 1:
                tensor.view(-1)[::5] = 0
            if rank == 1:
                tensor.view(-1)[1::5] = 0
    return inputs


@every()
def test_a_failed_operation_leaves_no_trace(method: str) -> None:
    cohort, untouched = trained(method), trained(method)
    driver, before = cohort.driver, memories(cohort)
    expected = untouched.average(gradients(untouched, BEFORE))
    assert untouched.driver.operations > 0
    for driver.at in range(untouched.driver.operations):
        for driver.told in (True, False):
            inputs = gradients(cohort, BEFORE)
            with pytest.raises(ConnectionError, match="a test"):
                cohort.average(inputs, in_place=not driver.told)
            check_memories(cohort, before, f"operation {driver.at}, told: {driver.told}")
            if driver.told:
                assert same_state(inputs, gradients(cohort, BEFORE)), "a gradient was changed"
    driver.at = None
    assert same_state(cohort.average(gradients(cohort, BEFORE)), expected)
    check_next_step(cohort, untouched)


@every()
def test_a_step_that_is_not_committed_leaves_no_trace(method: str) -> None:
    """Though all numbers are finite here: those of another bucket are not. A delay keeps the bad news."""
    cohort, untouched = trained(method), trained(method)
    driver, before = cohort.driver, memories(cohort)
    driver.refuses = True
    cohort.average(gradients(cohort, BEFORE))
    for kept, now in zip(before, memories(cohort), strict=True):
        if is_late(method):
            assert now["delay"]["committed"] is False
            kept["delay"] = now["delay"]
    check_memories(cohort, before, "not committed")
    driver.refuses = False
    found, expected = (each.average(gradients(each, BEFORE)) for each in (cohort, untouched))
    assert is_late(method) or same_state(found, expected)
    check_next_step(cohort, untouched)


@every(EARLY)
def test_a_failure_of_a_program_that_has_begun_leaves_no_trace(method: str) -> None:
    """It has read the gradients, as those of a delay do, and waits for the memory of its means."""
    cohort, untouched = trained(method), trained(method)
    driver, before = cohort.driver, memories(cohort)
    untouched.average(gradients(untouched, BEFORE))
    for driver.at in range(untouched.driver.operations):
        for driver.told in (True, False):
            programs = []
            for session, tensors in zip(cohort.sessions, gradients(cohort, BEFORE), strict=True):
                session.engine.begin_step()
                _, views = session.engine.views(tensors)
                assert session.engine.reads_early(views)
                programs.append(session.engine.begun(views))
            with pytest.raises(ConnectionError, match="a test"):
                driver.run(programs)
            check_memories(cohort, before, f"operation {driver.at}, told: {driver.told}")
    driver.at = None
    cohort.average(gradients(cohort, BEFORE))
    check_next_step(cohort, untouched)


def test_a_reconciliation_that_failed_is_still_due(monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = trained(DRIFTS)
    before = [copy.deepcopy(session.engine.parameters) for session in cohort.sessions]
    for cohort.driver.at in (0, 1):
        with pytest.raises(ConnectionError, match="a test"):
            cohort.driver.run([session.reconciliation() for session in cohort.sessions])
        assert same_state([session.engine.parameters for session in cohort.sessions], before)
    for session in cohort.sessions:
        begun: list[Program] = []
        monkeypatch.setattr(session, "run", begun.append)
        session.reconcile(when_due=True)
        (program,) = begun
        program.close()


def trained(method: str) -> Cohort:
    cohort = Cohort(method, SIZE, driver=Failing(SIZE))
    for step in range(BEFORE):
        cohort.average(gradients(cohort, step))
    return cohort


def memories(cohort: Cohort) -> list[dict[str, object]]:
    return [memory(session) for session in cohort.sessions]


def check_memories(cohort: Cohort, expected: list[dict[str, object]], when: str) -> None:
    for rank, (now, kept) in enumerate(zip(memories(cohort), expected, strict=True)):
        changed = [field for field in kept | now if not same_state(kept.get(field), now.get(field))]
        assert not changed, f"rank {rank}, {when}: {changed}"


def check_next_step(cohort: Cohort, untouched: Cohort) -> None:
    """It gives the same on both, and leaves the same."""
    found, expected = (each.average(gradients(each, BEFORE + 1)) for each in (cohort, untouched))
    assert same_state(found, expected)
    check_memories(cohort, memories(untouched), "after clean steps")
