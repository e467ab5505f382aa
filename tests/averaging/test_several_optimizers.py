"""Laws of schedules with several optimizers, such as Muon and AdamW: every schedule, every order of steps."""

import copy
import random
from itertools import starmap

import pytest
import torch
from torch import nn

from tests.averaging.cohort import CONFIGURATIONS, Cohort, adam, equal, everything, normed, sgd
from tests.averaging.test_schedule_laws import through_a_file
from tests.hosts.common import muon_and_adamw
from tests.laws.cohort import same_state
from thinwire import StateError, parse

ORDERS = ([0, 1], [1, 0])


def halves_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Every other parameter, so that all blocks and fragments have both."""
    parameters = list(model.parameters())
    return parameters[::2], parameters[1::2]


def two_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(half, lr=0.2, momentum=0.5) for half in halves_of(model)]


def two_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(half, lr=0.01) for half in halves_of(model)]


class Several(Cohort):
    """Replicas with several optimizers, which step one after the other on all ranks.

    As on a host, the sessions are called by hooks of the optimizers: that is where sync rounds begin.
    """

    def __init__(self, method: str, size: int, optimizers, order: list[int], **options) -> None:
        super().__init__(method, size, optimizer=optimizers, **options)
        self.order = order
        self.due = [[] for _ in range(size)]
        for session, due in zip(self.sessions, self.due, strict=True):
            session.optimizers.watch(after=lambda session=session, due=due: due.append(session.advance()))

    def train(self, steps, *, poisoned: int | None = None) -> None:
        for step in steps:
            for rank in range(len(self.models)):
                self.backward(rank, step, torch.nan if rank == poisoned else 1.0)
            self.average_gradients()
            for which in self.order:
                for optimizers in self.optimizers:
                    optimizers[which].step()
                self.run_due()

    def run_due(self) -> None:
        programs = [due.pop() for due in self.due if due]
        if programs and programs[0] is not None:
            self.driver.run(programs)


def of_all_ranks(cohort: Cohort) -> list[torch.Tensor]:
    """Models, and what the optimizers remember in the order of the parameters."""
    found = []
    for model, given in zip(cohort.models, cohort.optimizers, strict=True):
        found += everything(model)
        state = {
            p: kept
            for each in (given if isinstance(given, list) else [given])
            for p, kept in each.state.items()
        }
        for parameter in model.parameters():
            found += [
                kept.clone() for _, kept in sorted(state.get(parameter, {}).items()) if kept is not None
            ]
    return found


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bit for bit; a number that is not finite is not finite in both."""
    return torch.equal(x.isfinite(), y.isfinite()) and torch.equal(x[x.isfinite()], y[y.isfinite()])


@pytest.mark.parametrize(("two", "one"), [(two_sgd, sgd), (two_adamw, adam)], ids=["momentum", "adamw"])
@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_two_for_a_half_each_are_one_for_all(method: str, two, one) -> None:
    """Bit for bit: parameters, buffers, what the optimizers remember, bytes. One rank's numbers are not
    finite in a step: what is then forgotten and taken back is the same as well."""
    expected = Cohort(method, 2, make=normed, optimizer=one)
    in_each_order = [Several(method, 2, two, order, make=normed) for order in ORDERS]
    for step in range(24):
        for cohort in (expected, *in_each_order):
            if step < 23:
                cohort.train([step], poisoned=1 if step == 15 else None)
            else:
                cohort.sync()
        for found in in_each_order:
            assert all(starmap(same, zip(of_all_ranks(expected), of_all_ranks(found), strict=True))), step
    for found in in_each_order:
        assert found.sessions[0].metrics() == expected.sessions[0].metrics()
        assert found.driver.meters[1].total.sent_bytes == expected.driver.meters[1].total.sent_bytes


@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_replicas_with_muon_and_adamw_are_equal_after_a_sync_round(method: str) -> None:
    """Where all fragments met at once, and after a forced sync; the order of the steps changes no bit."""
    cohort, other = (Several(method, 3, muon_and_adamw, order, make=normed) for order in ORDERS)
    met = 0
    for step in range(13):
        for each in (cohort, other):
            each.train([step])
        assert all(starmap(equal, zip(cohort.models, other.models, strict=True)))
        if cohort.sessions[0].clock.all_synced:
            met += 1
            assert all(equal(model, cohort.models[0]) for model in cohort.models[1:])
    schedule = parse(method)
    assert met or schedule.fragment_count > 1 or schedule.period > 13
    assert all(session.step == 13 for session in cohort.sessions)
    cohort.sync()
    assert all(equal(model, cohort.models[0]) for model in cohort.models[1:])


def test_the_order_may_differ_between_ranks_and_steps() -> None:
    """A rank's own affair: each complete training step is the same."""
    for method in ("localsgd(every=2, momentum='average')", "diloco(every=3)"):
        expected, found = (Several(method, 2, muon_and_adamw, [0, 1]) for _ in range(2))
        expected.train(range(6))
        shuffled = random.Random(1)
        for step in range(6):
            for rank in range(2):
                found.backward(rank, step)
                for which in shuffled.sample([0, 1], 2):
                    found.optimizers[rank][which].step()
            found.run_due()
        assert all(equal(*pair) for pair in zip(expected.models, found.models, strict=True))


@pytest.mark.parametrize("stop", [7, 8])
@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_a_checkpoint_with_muon_and_adamw_goes_on_bit_for_bit(method: str, stop: int) -> None:
    straight, before, after = (
        Several(method, 2, muon_and_adamw, order, make=normed) for order in ([0, 1], [0, 1], [1, 0])
    )
    straight.train(range(16))
    before.train(range(stop))
    for old, new in zip(before.sessions, after.sessions, strict=True):
        new.load_state_dict(through_a_file(old.state_dict()))
    after.train(range(stop, 16))
    for rank in range(2):
        assert equal(straight.models[rank], after.models[rank])
        assert same_state(straight.sessions[rank].sealed(), after.sessions[rank].sealed())


def test_a_checkpoint_that_is_loaded_in_the_middle_of_a_step_begins_a_new_one() -> None:
    straight, cohort = (Several("localsgd(every=4)", 2, muon_and_adamw, [0, 1]) for _ in range(2))
    straight.train(range(10))
    cohort.train(range(6))
    saved = [through_a_file(session.state_dict()) for session in cohort.sessions]
    cohort.backward(0, 6)
    cohort.optimizers[0][0].step()  # and then something fails
    for session, state in zip(cohort.sessions, saved, strict=True):
        session.load_state_dict(state)
    cohort.train(range(6, 10))
    assert all(equal(*pair) for pair in zip(straight.models, cohort.models, strict=True))


def test_checkpoints_of_other_optimizers_are_refused_and_nothing_is_loaded() -> None:
    makers = {
        "one": adam,
        "muon and adamw": muon_and_adamw,
        "adamw and muon": lambda model: muon_and_adamw(model)[::-1],
        "three": lambda model: [
            torch.optim.AdamW(m.parameters(), lr=0.01) for m in (*model.body[:3:2], model.rest)
        ],
    }

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = normed()
            self.body, self.rest = whole.body[:3], nn.ModuleList([whole.body[4:], whole.norm])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest[1](self.rest[0](self.body(x)))

    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return Parts()

    cohorts = {}
    for name, optimizers in makers.items():
        cohorts[name] = Cohort("localsgd(every=2)", 2, make=make, optimizer=optimizers)
        for rank in range(2):
            cohorts[name].backward(rank, 0)
            given = cohorts[name].optimizers[rank]
            for optimizer in given if isinstance(given, list) else [given]:
                optimizer.step()
        cohorts[name].advance()
    messages = {
        (
            "one",
            "muon and adamw",
        ): r"has the states of 1 optimizers, and this run has 2 \(Muon and AdamW\): load",
        ("muon and adamw", "one"): r"has the states of 2 optimizers, and this run has 1 \(AdamW\)",
        ("three", "muon and adamw"): "has the states of 3 optimizers, and this run has 2",
        ("muon and adamw", "adamw and muon"): "the state of AdamW in .*optimizers has groups of",
    }
    for (written, read), message in messages.items():
        session = cohorts[read].sessions[0]
        before = copy.deepcopy(session.sealed())
        with pytest.raises(StateError, match=message):
            session.load_state_dict(cohorts[written].sessions[0].state_dict())
        assert same_state(before, session.sealed())
