"""A rank sends one non-finite number in a sync round or a warm-up: all that the others keep stays finite."""

from collections.abc import Iterator

import pytest
import torch

from tests.averaging.cohort import CONFIGURATIONS, Cohort, adam, normed
from tests.fuzz_payloads import Group
from tests.laws.test_hostile_values import SIZE, VALUES, Saboteur, Watched
from thinwire import DisagreementError, PayloadError, parse
from thinwire.core.channel import Program

METHODS = [method for method in CONFIGURATIONS if parse(method).period <= 20]
WARM = 4
"""Steps before: warm-ups with averaged gradients are under way, or over."""


class Sabotaged(Group):
    """Replicas of which one may be a saboteur."""

    saboteur: Saboteur | None = None

    def run(self, programs: list[Program]) -> bool:
        if self.saboteur is None:
            return super().run(programs)
        with self.saboteur.at_work():
            return super().run(
                [Watched(program, rank, self.saboteur) for rank, program in enumerate(programs)]
            )


def kept(cohort: Cohort, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a rank keeps from one step to the next."""
    session, model, optimizer = cohort.sessions[rank], cohort.models[rank], cohort.optimizers[rank]
    yield from model.state_dict().items()
    for number, state in enumerate(optimizer.state.values()):
        yield from ((f"{name} of parameter {number}", value) for name, value in state.items())
    for number, block in enumerate(session.blocks):
        yield f"anchor {number}", block.anchor
        if block.velocity is not None:
            yield f"velocity {number}", block.velocity
    for name, fields in session.engine.states.entries().items():
        yield from ((f"{field} of {name}", value) for field, value in fields.items())
    if session.gradient_warmup is not None:
        yield "norms", torch.stack([session.gradient_warmup.own, session.gradient_warmup.common])


def trained(method: str, saboteur: Saboteur) -> Cohort:
    """A cycle, and until its last result has arrived, with the saboteur; one step without."""
    cohort, schedule = (
        Cohort(method, SIZE, make=normed, optimizer=adam, driver=Sabotaged(SIZE)),
        parse(method),
    )
    cohort.train(range(WARM))
    cohort.driver.saboteur = saboteur
    end = WARM + schedule.period + schedule.delay + 1
    cohort.train(range(WARM, end))
    cohort.driver.saboteur = None
    cohort.train([end])
    return cohort


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_the_others_keep_finite_numbers_only(method: str, rank: int) -> None:
    scout = Saboteur(rank, -1, 0.0)
    trained(method, scout)
    assert scout.places
    for target in range(scout.places):
        saboteur = Saboteur(rank, target, VALUES[target % len(VALUES)])
        try:
            cohort = trained(method, saboteur)
        except (PayloadError, DisagreementError):  # of a rank that has gone its own way
            continue
        for peer in set(range(SIZE)) - {rank}:
            bad = [name for name, value in kept(cohort, peer) if not value.isfinite().all()]
            assert not bad, f"{saboteur.value} at place {target} of {scout.places}: rank {peer} keeps {bad}"
