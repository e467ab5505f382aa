"""A delayed method in lock-step: the parameters follow one-step-stale SGD, bit for bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.laws.cohort import Cohort, same_bits, same_state
from thinwire import ConfigError, parse
from thinwire.core import schema
from thinwire.core.delay import NOTHING
from thinwire.errors import StateError

SHAPES = {"wide": (6, 9), "vector": (7,)}
CENTRES = [torch.arange(54.0).reshape(6, 9) * (rank + 1) / 50 - rank for rank in range(3)]


def gradients(x: torch.Tensor, bad: bool = False) -> list[dict[str, torch.Tensor]]:
    """Of a quadratic with another minimum on every rank."""
    found = [{"wide": x - centre, "vector": (x - centre)[0, :7]} for centre in CENTRES]
    if bad:
        found[1]["wide"] = found[1]["wide"].clone()
        found[1]["wide"][2, 3] = math.inf
    return found


@given(
    method=st.sampled_from(["dense", "topk(ratio=0.2)", "qsgd", "powersgd(rank=1)", "dgc(ratio=0.2)"]),
    bad=st.lists(st.booleans(), min_size=1, max_size=8),
)
def test_parameters_follow_one_step_stale_sgd(method: str, bad: list[bool]) -> None:
    """theta_{t+1} = theta_t - gamma m_{t-1}; a step whose mean is not finite is skipped, as a scaler does."""
    delayed, plain = Cohort(f"delayed(method={method})", 3, SHAPES), Cohort(method, 3, SHAPES)
    x = y = torch.zeros(6, 9)
    before: torch.Tensor | None = torch.zeros(6, 9)
    for wrong in bad:
        outputs = delayed.average(gradients(x, wrong))
        assert all(same_state(outputs[0], other) for other in outputs)
        step = outputs[0]["wide"]
        if step.isfinite().all():
            x = x - 0.1 * step
        mean = plain.average(gradients(y, wrong))[0]["wide"]
        if before is not None:
            y = y - 0.1 * before
        else:
            assert not step.isfinite().any()
        before = None if wrong else mean
        assert same_bits(x, y)


def test_the_first_step_gets_zeros_and_what_waits_counts_as_residual() -> None:
    cohort = Cohort("delayed(method=dense)", 2, SHAPES)
    inputs = cohort.inputs(0)
    assert all(not tensor.any() for output in cohort.average(inputs) for tensor in output.values())
    waiting = cohort.residuals()
    for name in SHAPES:
        torch.testing.assert_close(waiting[name], (inputs[0][name] + inputs[1][name]).double())


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_of_another_number_of_ranks_keeps_what_waits(size: int) -> None:
    """The mean is equal on all ranks, so it is not summed over them."""
    old, new = Cohort("delayed(method=topk(ratio=0.2))", 2), Cohort("delayed(method=topk(ratio=0.2))", size)
    for step in range(3):
        old.average(old.inputs(step))
    for session in new.sessions:
        session.load_state_dict(old.sessions[0].state_dict(), on_resize="drop")
    expected = old.average(old.inputs(3))[0]
    assert all(same_state(expected, output) for output in new.average(new.inputs(3)))


def test_an_aborted_step_survives_a_checkpoint() -> None:
    method = "delayed(method=topk(ratio=0.2))"
    old, new = Cohort(method, 3, SHAPES), Cohort(method, 3, SHAPES)
    old.average(gradients(torch.zeros(6, 9)))
    old.average(gradients(torch.zeros(6, 9), bad=True))
    for before, after in zip(old.sessions, new.sessions, strict=True):
        after.load_state_dict(before.state_dict())
    for output in new.average(gradients(torch.ones(6, 9))):
        assert not any(tensor.isfinite().any() for tensor in output.values())


def test_what_waits_is_checked_when_it_is_loaded() -> None:
    cohort = Cohort("delayed(method=dense)", 1, SHAPES)
    (session,) = cohort.sessions
    cohort.average(cohort.inputs(0))
    kept = session.engine.delay.save()
    for damage, message in {
        "lost": "has the means of 1 of 2 parameters",
        "shape": "this session needs",
        "step": "step",
    }.items():
        state = session.snapshot()
        means = dict(kept["means"])
        if damage == "lost":
            del means["wide"]
        elif damage == "shape":
            means["wide"] = means["wide"][:5]
        state["delay"] = {**kept, "means": means, "step": -2 if damage == "step" else kept["step"]}
        with pytest.raises(StateError, match=message):
            session.load_sealed([schema.seal(state)], None)
    assert kept["step"] != NOTHING


def test_what_cannot_be_delayed_is_refused() -> None:
    for text, why in {
        "delayed(method=a2sgd)": "lets replicas drift",
        "delayed(method=lag)": "has rules about the steps",
        "delayed(method=lasg)": "has rules about the steps",
        "delayed(method=delayed)": "cannot be inside",
        "warmup(method=delayed)": "cannot be inside",
        "periodic(exchange=delayed)": "overlap",
        "delayed(delay=2)": "delay must be one of",
        "delayed(method=adam, delay='auto')": "do not add up",
    }.items():
        with pytest.raises(ConfigError, match=why):
            parse(text)
