"""Methods that see a whole bucket or the whole model at once, under DDP."""

from dataclasses import dataclass
from typing import ClassVar

import torch

import thinwire
from tests.hosts.common import (
    assert_same_everywhere,
    mlp,
    reference,
    square_loss,
    train,
    under_ddp,
    wrap,
)
from thinwire.core import Exchange, Layout, Link, State, Traits, replicated, residual
from thinwire.net.launch import Worker, run_local


@dataclass
class Remembered(State):
    error: torch.Tensor = residual()
    mask: torch.Tensor = replicated()


@dataclass(frozen=True)
class AlternateHalves(Exchange):
    """Sends every second coordinate, the other half the next time: depends on where a coordinate lies."""

    name: ClassVar[str] = "alternate"
    scope: str = "model"

    @property
    def traits(self) -> Traits:
        return Traits(conserves=True, scope=self.scope)

    def init(self, layout: Layout) -> Remembered:
        error = torch.zeros(layout.numel, device=layout.device)
        mask = torch.zeros(layout.numel, dtype=torch.bool, device=layout.device)
        mask[::2] = True
        return Remembered(error, mask)

    async def run(self, x, out, state, ch) -> None:
        u = x + state.error
        mean = await ch.mean(torch.where(state.mask, u, 0))
        if await ch.commit(bool(mean.isfinite().all())):
            state.error.copy_(torch.where(state.mask, 0, u))
            state.mask.logical_not_()
        out.copy_(mean)

    def payload_bytes(self, layout: Layout, size: int, link: Link) -> int:
        return layout.dense_bytes


@dataclass(frozen=True)
class HalfNow(AlternateHalves):
    """Sends half of everything and keeps the other: the same for whatever is seen together."""

    name: ClassVar[str] = "halfnow"
    scope: str = "bucket"

    async def run(self, x, out, state, ch) -> None:
        half = (x + state.error) / 2
        mean = await ch.mean(half)
        if await ch.commit(bool(mean.isfinite().all())):
            state.error.copy_(half)
        out.copy_(mean)


def scopes(worker: Worker) -> dict[str, torch.Tensor]:
    results = {}
    for method in (AlternateHalves(), HalfNow()):
        for overlap in (True, False):
            for views in (True, False):
                label = f"{method}, overlap={overlap}, views={views}"
                ddp = {"gradient_as_bucket_view": views}
                results[label] = under_ddp(worker, mlp(), method, range(6), ddp=ddp, overlap=overlap)
                results[f"{label} reference"] = reference(worker, mlp(), method, range(6))
    return results


def test_residuals_and_replicated_state_survive_the_rebuild_of_buckets() -> None:
    assert_same_everywhere(run_local(scopes, 2))


def one_exchange_a_step(worker: Worker) -> tuple[int, int, list[str]]:
    model = wrap(mlp())
    session = thinwire.attach(model, AlternateHalves(), dense_below=0)
    train(model, worker.rank, range(3))
    before = session.meter.rounds
    square_loss(model, worker.rank, 3).backward()
    state = session.sealed()["state"]
    session.detach()
    return session.meter.rounds - before, session.meter.steps, sorted(state)


def test_a_model_scope_method_runs_once_a_step_over_all_buckets() -> None:
    for rounds, steps, names in run_local(one_exchange_a_step, 2):
        assert (rounds, steps) == (1, 4)
        assert "\n".join(name for name, _ in mlp().named_parameters()) in names, names
