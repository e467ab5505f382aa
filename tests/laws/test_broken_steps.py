"""An exchange that a failed operation ends leaves no trace: the next step may be taken with other ranks."""

import pytest
import torch

from tests.laws.cohort import ALSO, Cohort
from thinwire import PeerError, list_methods
from thinwire.drivers import Lockstep
from thinwire.net import frames

METHODS = (*(str(cls()) for cls in list_methods().values()), *ALSO)
SHAPES: dict[str, tuple[int, ...]] = {"wide": (24, 37), "vector": (301,)}


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_operation_leaves_no_trace(method: str) -> None:
    cohort = Cohort(method, 2, SHAPES)
    for step in range(3):
        cohort.average(cohort.inputs(step))
    inputs = cohort.inputs(3)
    engines = [session.engine for session in cohort.sessions]
    before = [engine.states.entries() for engine in engines]
    operation = 0
    while broken(engines, inputs, operation):
        for engine, kept in zip(engines, before, strict=True):
            now = engine.states.entries()
            assert now.keys() == kept.keys()
            for name, fields in kept.items():
                for field, tensor in fields.items():
                    assert torch.equal(now[name][field], tensor), f"{name} {field}, operation {operation}"
        operation += 1
    assert operation > 0
    for given, again in zip(inputs, cohort.inputs(3), strict=True):
        assert all(torch.equal(given[name], again[name]) for name in again), "a gradient was changed"


def broken(engines: list, inputs: list[dict[str, torch.Tensor]], number: int) -> bool:
    """A step whose operation `number` fails on both ranks; False if it does not have so many."""
    driver = Lockstep(len(engines))
    programs = [
        engine.program(engine.views(tensors)[1]) for engine, tensors in zip(engines, inputs, strict=True)
    ]
    requests: list = [None] * len(programs)
    answers: dict[int, object] = dict.fromkeys(range(len(programs)))
    try:
        for _ in range(number + 1):
            for rank, answer in answers.items():
                requests[rank] = programs[rank].send(answer)
            if isinstance(requests[0], frames.Commit):
                return False
            answers = driver.serve(requests)
        for program in programs:
            with pytest.raises(PeerError):
                program.throw(PeerError("a test"))
    except StopIteration:
        return False
    finally:
        for program in programs:
            program.close()
    return True
