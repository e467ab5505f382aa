"""EF21 with momentum: the paper's recursion, unlike data, world sizes, refusals."""

import pytest
import torch

from tests.laws.cohort import Cohort, memory, same_state
from tests.laws.test_laws import Quadratic
from thinwire import ConfigError
from thinwire.methods import EF21, EFSign, TopK

SHAPES = {"wide": (24, 37)}
N = 24 * 37


def top(u: torch.Tensor, k: int) -> torch.Tensor:
    c = torch.zeros_like(u)
    largest = u.abs().topk(k).indices
    c[largest] = u[largest]
    return c


@pytest.mark.parametrize("a", [0.0, 0.9])
@pytest.mark.parametrize("exchange", [TopK(ratio=0.05, reduce="gather"), EFSign(reduce="gather")])
def test_it_is_the_recursion_of_the_paper(exchange, a: float) -> None:
    """c = C(v - h), where the code sees the exchange's residual and the change instead of v - h."""
    size = 3
    cohort = Cohort(EF21(exchange, momentum=a), size, SHAPES)
    v, own, h = torch.zeros(size, N).double(), torch.zeros(size, N).double(), torch.zeros(N).double()
    for step in range(8):
        inputs = cohort.inputs(step)
        out = cohort.average(inputs)[0]["wide"].view(-1)
        for rank in range(size):
            v[rank] = a * v[rank] + inputs[rank]["wide"].double().view(-1)
            u = v[rank] - own[rank]
            if isinstance(exchange, TopK):
                c = top(u, int(0.05 * N))
            else:
                c = u.abs().mean() * torch.where(u >= 0, 1.0, -1.0).double()
            own[rank] += c
            h += c / size
        assert torch.allclose(out.double(), h, atol=1e-4), step
        assert torch.allclose(h, own.mean(0))
    missing = (v - own).sum(0)
    assert torch.allclose(cohort.residuals()["wide"].view(-1), missing, atol=1e-4)


def test_with_constant_gradients_nothing_is_missing_in_the_end() -> None:
    """Unlike error feedback, whose output goes on to jump about the mean, it comes to rest at it."""
    ef21 = Cohort(EF21(TopK(ratio=0.05), momentum=0.0), 3, SHAPES)
    plain = Cohort(TopK(ratio=0.05), 3, SHAPES)
    inputs = ef21.inputs(0)
    mean = sum(one["wide"] for one in inputs) / 3
    for _ in range(25):
        output = ef21.average(inputs)[0]["wide"]
        jumping = plain.average(inputs)[0]["wide"]
    assert torch.allclose(output, mean, atol=1e-5)
    assert (jumping - mean).norm() > mean.norm()


def test_ranks_with_unlike_data_meet_at_the_common_minimum() -> None:
    problem, cohort = Quadratic(4), Cohort(EF21(TopK(ratio=0.05), momentum=0.5), 4, {"wide": (20, 30)})
    x = torch.zeros(20, 30)
    for _ in range(800):  # a constant rate: what is missing vanishes by itself
        x = x - 0.01 * cohort.average(problem.gradients(x))[0]["wide"]
    assert (x - problem.best).norm() < 1e-3 * problem.best.norm()


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (3, 2)])
def test_another_world_size_keeps_what_all_know(old: int, new: int) -> None:
    method = EF21(TopK(ratio=0.1), momentum=0.5)
    before, after = Cohort(method, old, SHAPES), Cohort(method, new, SHAPES)
    for step in range(5):
        h = before.average(before.inputs(step))[0]["wide"]
    states = [session.state_dict() for session in before.sessions]
    for rank, session in enumerate(after.sessions):
        mine = states[rank::new]
        session.load_state_dict(mine or states[0], on_resize="sum" if mine else "drop")
    known = [s.engine.states.entries()["wide"] for s in before.sessions]
    moving = sum(k["v"] - k["error"] for k in known) / old  # the mean of all h_i
    assert torch.allclose(moving, h.view(-1), atol=1e-4)
    inputs = after.inputs(9)
    first = after.average(inputs)
    assert all(same_state(first[0], other) for other in first), "equal on all ranks again"
    entries = [s.engine.states.entries()["wide"] for s in after.sessions]
    now = sum(k["v"] - k["error"] for k in entries) / new
    assert torch.allclose(now, first[0]["wide"].view(-1), atol=1e-4), "the mean of all h_i"


def test_a_non_finite_number_in_what_the_others_know_aborts_the_step() -> None:
    """The first step with another number of ranks averages h. A hostile or broken rank may send anything."""
    before, after = Cohort("ef21", 3, SHAPES), Cohort("ef21", 2, SHAPES)
    for step in range(3):
        before.average(before.inputs(step))
    for session, old in zip(after.sessions, before.sessions, strict=False):
        session.load_state_dict(old.state_dict(), on_resize="drop")
    saved = memory(after.sessions[0])
    after.sessions[1].engine.make_states([after.sessions[1].engine.layout(["wide"], torch.device("cpu"))])
    (live,) = after.sessions[1].engine.states._live.values()
    live.state.h[7] = torch.inf
    (session, _), outputs = after.sessions, after.average(after.inputs(9))
    assert outputs[0]["wide"].isnan().all()
    assert same_state(saved, memory(session))


def test_without_a_residual_an_exchange_is_refused() -> None:
    for inner in ("qsgd", "topk(feedback=False)", "topk(decay=0.9)", "signsgd"):
        with pytest.raises(ConfigError, match="loses what it does not send"):
            Cohort(f"ef21(exchange={inner})", 1)
    for inner in ("dgc", "a2sgd", "lag"):
        with pytest.raises(ConfigError, match="cannot be its exchange"):
            Cohort(f"ef21(exchange={inner})", 1)
