"""Saving, loading and going on: bit for bit on as many ranks, and never out of step unnoticed."""

import io

import pytest
import torch

import thinwire
from tests.hosts.common import METHODS, assert_same_everywhere, flat, mlp, train, wrap
from thinwire.net.launch import Worker, run_local

STEPS = 4  # before a run is saved, and after it is loaded


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Run:
    """A model, its optimizer and its session."""

    def __init__(self, method: str) -> None:
        self.model = wrap(mlp())
        self.session = thinwire.attach(self.model, method)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, worker: Worker, steps: range) -> None:
        train(self.model, worker.rank, steps, optimizer=self.optimizer)

    def save(self) -> dict:
        return through_a_file(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "thinwire": self.session.state_dict(),
            }
        )

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.session.load_state_dict(state["thinwire"])


def under_ddp(worker: Worker) -> dict[str, torch.Tensor]:
    results = {}
    for method in METHODS:
        straight, before, after = (Run(method) for _ in range(3))
        straight.train(worker, range(2 * STEPS))
        before.train(worker, range(STEPS))
        after.load(before.save())
        after.train(worker, range(STEPS, 2 * STEPS))
        results[method], results[f"{method} reference"] = flat(after.model), flat(straight.model)
        memories = (straight.session.sealed(), after.session.sealed())
        for name, kept in memories[0]["state"].items():
            for field, tensor in kept.items():
                assert torch.equal(tensor, memories[1]["state"][name][field]), f"{method}: {field} of {name}"
        for run in (straight, before, after):
            run.session.detach()
    return results


def test_eight_steps_are_four_and_four_under_ddp() -> None:
    assert_same_everywhere(run_local(under_ddp, 2, timeout=400))


def with_average(worker: Worker) -> dict[str, torch.Tensor]:
    named = {name: torch.zeros_like(p) for name, p in mlp().named_parameters()}

    def go(session: thinwire.Session, steps: range) -> list[torch.Tensor]:
        means = []
        for step in steps:
            rng = torch.Generator().manual_seed(100 * step + worker.rank)
            given = {name: torch.randn(p.shape, generator=rng) for name, p in named.items()}
            means.append(flat(session.average(given).values()))
        return means

    results = {}
    for method in METHODS:
        straight, before, after = (thinwire.Session(named.items(), method) for _ in range(3))
        results[f"{method} reference"] = torch.cat(go(straight, range(2 * STEPS)))
        first = go(before, range(STEPS))
        after.load_state_dict(through_a_file(before.state_dict()))
        results[method] = torch.cat(first + go(after, range(STEPS, 2 * STEPS)))
        for session in (straight, before, after):
            session.detach()
    return results


@pytest.mark.slow
def test_eight_steps_are_four_and_four_with_average() -> None:
    assert_same_everywhere(run_local(with_average, 2, timeout=400))


def completed(session: thinwire.Session, given: dict[str, torch.Tensor]) -> None:
    """A step to its end: with a delay the ranks compare beside the next one."""
    session.average(given)
    session.wait()


def out_of_step(worker: Worker) -> dict[str, str]:
    """Rank 0 loads a checkpoint and rank 1 forgets to."""
    named = {"weight": torch.zeros(40, 40)}
    texts = {}
    for method in METHODS:
        session = thinwire.Session(named.items(), method)
        given = {"weight": torch.ones(40, 40) * worker.rank}
        for _ in range(3):
            session.average(given)
        saved = session.state_dict()
        counts = session.step > 0
        session.detach()
        if counts:
            session = thinwire.Session(named.items(), method)
            if worker.rank == 0:
                session.load_state_dict(saved)
            with pytest.raises(thinwire.DisagreementError) as caught:
                completed(session, given)
            texts[method] = str(caught.value)
            session.detach()
    model = wrap(mlp())
    session = thinwire.attach(model, "topk(ratio=0.1)")
    train(model, worker.rank, range(3))
    saved = session.state_dict()
    session.detach()
    session = thinwire.attach(model, "topk(ratio=0.1)")
    if worker.rank == 0:
        session.load_state_dict(saved)
    with pytest.raises(thinwire.DisagreementError) as caught:
        train(model, worker.rank, range(1))
    texts["under DDP"] = str(caught.value)
    session.detach()
    return texts


def test_ranks_that_are_out_of_step_raise_on_both_sides() -> None:
    first, second = run_local(out_of_step, 2, group_timeout=60)
    assert len(first) > 10, f"hardly a method counts its steps: {list(first)}"
    for method, text in first.items():
        assert "at different steps (rank 0: step 3; rank 1: step 0)" in text, f"{method}: {text}"
        assert second[method] == text
        assert "load the same generation of the checkpoint on all ranks" in text
