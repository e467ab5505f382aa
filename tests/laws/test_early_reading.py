"""Methods that read early: after their first request the gradient may be overwritten, and they write last."""

import pytest
import torch

from tests.laws.cohort import CONFIGURATIONS, Cohort, memory, same_bits, same_state
from thinwire import parse
from thinwire.core.begun import Begun
from thinwire.core.routing import View

EARLY = [method for method in CONFIGURATIONS if parse(method).reads_early]
SIZE = 3
assert "topk(ratio=0.1)" in EARLY


class Kept:
    """For a driver that closes programs at the end of a step; these have still to deliver."""

    def __init__(self, program: Begun) -> None:
        self.send = program.send

    def close(self) -> None: ...


def overwritten(cohort: Cohort, inputs: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """A step whose gradients are lost once the programs have begun; the means go to other memory."""
    programs, targets, results = [], [], []
    for session, tensors in zip(cohort.sessions, inputs, strict=True):
        engine = session.engine
        engine.begin_step()
        _, views = engine.views({name: tensor.clone() for name, tensor in tensors.items()}, in_place=False)
        apart = [View(view.layout, view.x.clone(), torch.full_like(view.x, 7.0)) for view in views]
        assert engine.reads_early(apart)
        programs.append(engine.begun(apart))
        for view in apart:
            view.x.fill_(torch.nan)
        targets.append([View(view.layout, view.x, view.x) for view in apart])
        results.append(
            {
                name: part
                for v in apart
                for name, part in zip(v.layout.names, v.layout.parts(v.x), strict=True)
            }
        )
    committed = cohort.driver.run(list(map(Kept, programs)))
    for session, program, views in zip(cohort.sessions, programs, targets, strict=True):
        session.engine.end_step(committed)
        assert all(view.x.isnan().all() for view in views), "written before it was delivered"
        if committed:
            program.deliver(views)
    return results


@pytest.mark.parametrize("method", EARLY)
def test_gradients_may_be_overwritten_once_a_program_has_begun(method: str) -> None:
    usual, late = Cohort(method, SIZE), Cohort(method, SIZE)
    for cohort in (usual, late):
        cohort.average(cohort.inputs(0))
    for step in (1, 2, 3, 4):
        inputs = usual.inputs(step)
        if step == 3:
            inputs[1]["wide"][5, 5] = torch.inf
        expected, found = usual.average(inputs), overwritten(late, inputs)
        for wanted, means in zip(expected, found, strict=True):
            for name, mean in wanted.items():
                if step != 3:
                    assert same_bits(mean.view(-1), means[name]), f"{name} in step {step}"
        for one, other in zip(usual.sessions, late.sessions, strict=True):
            assert same_state(memory(one), memory(other)), f"the states differ after step {step}"
