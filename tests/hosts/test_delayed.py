"""Delays in real processes, under DDP and with `session.average`: step t+1 applies the mean of step t."""

import copy
import io

import pytest
import torch

import thinwire
from tests.hosts.common import MANY, assert_same_everywhere, flat, mlp, square_loss, train, wrap
from thinwire.core.delay import Delay
from thinwire.core.layout import Layout
from thinwire.core.routing import View
from thinwire.drivers import waiting
from thinwire.net.launch import Worker, run_local

METHODS = ("dense", "topk(ratio=0.2)", "powersgd(rank=1)")
STEPS = range(6)
LOOPS = {"plain": {}, "no_sync": {"accumulate": 2}, "clipping": {"clip": 0.05}}


def stale(worker: Worker, method: str, **loop) -> torch.Tensor:
    """The reference: gradients averaged at once by the plain method, applied one step later."""
    module = mlp()
    named = dict(module.named_parameters())
    session = thinwire.Session(named.items(), method)
    before = {name: torch.zeros_like(p) for name, p in named.items()}

    def average() -> None:
        nonlocal before
        means = session.average({name: p.grad for name, p in named.items()})
        for name, p in named.items():
            p.grad = before[name].clone()
        before = means

    trained = train(module, worker.rank, STEPS, average=average, **loop)
    session.detach()
    return trained


def under_ddp_and_by_hand(worker: Worker) -> dict[str, torch.Tensor]:
    results = {}
    for method in METHODS:
        for name, loop in LOOPS.items():
            label = f"{method}, {name}"
            model = wrap(mlp(), bucket_cap_mb=MANY, gradient_as_bucket_view=name == "plain")
            session = thinwire.attach(model, method, delay=1)
            results[label] = train(model, worker.rank, STEPS, **loop)
            assert session.step == len(STEPS)
            session.detach()
            results[f"{label} reference"] = stale(worker, method, **loop)
        module = mlp()
        session = thinwire.Session(module.named_parameters(), f"delayed(method={method})")

        def average(session=session, module=module) -> None:
            session.average({n: p.grad for n, p in module.named_parameters()}, in_place=True)

        results[f"{method}, average"] = train(module, worker.rank, STEPS, average=average)
        results[f"{method}, average reference"] = results[f"{method}, plain reference"]
        session.detach()
    return results


def test_training_is_one_step_stale() -> None:
    """DDP rebuilds its buckets after the first step: the means follow their parameters by name."""
    assert_same_everywhere(run_local(under_ddp_and_by_hand, 2, timeout=400))


class Run:
    def __init__(self, method: str) -> None:
        self.model = wrap(mlp())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session = thinwire.attach(self.model, method, optimizer=self.optimizer)

    def state(self) -> bytes:
        kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        file = io.BytesIO()
        torch.save({**kept, "thinwire": self.session.state_dict()}, file)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        kept = torch.load(io.BytesIO(state), weights_only=True)
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.session.load_state_dict(kept["thinwire"])


def resumed(worker: Worker) -> dict[str, torch.Tensor]:
    results = {}
    for method in ("delayed(method=topk(ratio=0.2))", "delayed(method=adam(warmup=3))"):
        straight, first, second = (Run(method) for _ in range(3))
        for run, steps in ((straight, range(8)), (first, range(5))):
            train(run.model, worker.rank, steps, optimizer=run.optimizer)
        second.load(first.state())
        results[method] = train(second.model, worker.rank, range(5, 8), optimizer=second.optimizer)
        results[f"{method} reference"] = flat(straight.model)
        for run in (straight, first, second):
            run.session.detach()
    return results


def test_what_is_under_way_is_part_of_the_checkpoint() -> None:
    assert_same_everywhere(run_local(resumed, 2, timeout=400))


def scaled(worker: Worker) -> dict[str, torch.Tensor]:
    """A gradient that overflows on one rank: the step after it is skipped on all; the scale follows."""
    results = {}
    for method in METHODS:
        model = wrap(mlp())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, growth_factor=4.0)
        session = thinwire.attach(model, method, scaler=scaler, delay=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
        scales, kept = [scaler.get_scale()], flat(model)
        for number, step in enumerate((0, 1, 2, -1, 3, 4, 5)):
            optimizer.zero_grad()
            loss = square_loss(model, worker.rank, step)
            if step < 0 and worker.rank == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if number == 4:
                assert torch.equal(kept, flat(model)), f"{method}: the step after the overflow was taken"
                assert scales[-1] == scales[-2] / 2, f"{method}: {scales}"
            kept = flat(model)
        assert len(set(scales)) > 2, f"{method}: the scale was to change: {scales}"
        session.detach()
        results[method] = flat(model)
        results[f"{method} reference"] = skipping(worker, method)
    return results


def skipping(worker: Worker, method: str) -> torch.Tensor:
    """The same without a scaler: the overflow is left out, and so is the step after it."""
    module = mlp()
    named = dict(module.named_parameters())
    session = thinwire.Session(named.items(), method)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)
    before: dict[str, torch.Tensor] | None = {name: torch.zeros_like(p) for name, p in named.items()}
    for step in (0, 1, 2, -1, 3, 4, 5):
        means = None
        if step >= 0:
            optimizer.zero_grad()
            square_loss(module, worker.rank, step).backward()
            means = session.average({name: p.grad for name, p in named.items()})
        if before is not None:
            for name, p in named.items():
                p.grad = before[name].clone()
            optimizer.step()
        before = means
    session.detach()
    return flat(module)


def test_a_grad_scaler_skips_the_step_after_an_overflow_on_all_ranks() -> None:
    assert_same_everywhere(run_local(scaled, 2, timeout=400))


def beside(worker: Worker) -> tuple[bool, int]:
    """On a link that takes seconds, a backward pass ends while the exchange is under way."""
    model = wrap(mlp())
    session = thinwire.attach(model, "topk(ratio=0.2)", delay=1)
    session.throttle("1gbit,latency=5s")
    square_loss(model, worker.rank, 0).backward()
    under_way = session.behind.under_way
    session.wait()
    done = session.step
    session.detach()
    return under_way, done


def test_the_exchange_runs_beside_the_training() -> None:
    assert run_local(beside, 2, timeout=400) == [(True, 1)] * 2


def adaptive(worker: Worker, under_ddp: bool) -> tuple[list[bool], float]:
    """Windows of four steps; the thresholds make the delay begin at the first vote and end at the next."""
    waiting.EVERY, waiting.BEGIN, waiting.END = 4, -1.0, 1e9
    module = mlp()
    model = wrap(module) if under_ddp else module
    method = "delayed(method=dense, delay='auto')"
    named = dict(module.named_parameters())
    session = thinwire.attach(model, method) if under_ddp else thinwire.Session(named.items(), method)
    applied = true = torch.zeros(())
    delays = []
    for step in range(12):
        for p in named.values():
            p.grad = None
        square_loss(model, worker.rank, step).backward()
        if not under_ddp:
            session.average({n: p.grad for n, p in named.items()}, in_place=True)
        applied = applied + flat(p.grad for p in named.values())
        delays.append(session.engine.delay.on)
        for rank in range(worker.size):  # the parameters do not change, so every rank knows all gradients
            plain = copy.deepcopy(mlp())
            square_loss(plain, rank, step).backward()
            true = true + flat(p.grad for p in plain.parameters()) / worker.size
    waits = session.residuals()
    left = flat(waits[n] for n in named) if waits else torch.zeros_like(applied)
    session.detach()
    return delays, float((applied + left - true).abs().max())


@pytest.mark.parametrize("under_ddp", [True, False])
def test_an_adaptive_delay_begins_and_ends_alike_and_loses_nothing(under_ddp: bool) -> None:
    (first, lost), (second, _) = run_local(adaptive, 2, under_ddp, timeout=400)
    assert first == second
    assert first == [False] * 5 + [True] * 4 + [False] * 3
    assert lost < 1e-6


def test_means_are_handed_over_without_a_copy_unless_buckets_have_changed() -> None:
    layouts = [Layout.of([(name, (3,))]) for name in "ab"]
    means, views = (
        [View(layout, out, out) for layout, out in zip(layouts, rows, strict=True)]
        for rows in (torch.tensor([[1.0] * 3, [2.0] * 3]), torch.zeros(2, 3))
    )
    delay = Delay(on=True)
    delay.keep(0, means, committed=True)
    assert [id(given) for given in delay.hand_over(views)] == [id(view.out) for view in means]
    assert (delay.ready, delay.given) == (None, 0)
    for changed in (views[::-1], views[1:]):
        delay.keep(1, means, committed=True)
        given = delay.hand_over(changed)
        assert [id(mean) for mean in given] == [id(view.out) for view in changed]
        assert given[0].tolist() == [2.0] * 3
    delay.keep(2, means, committed=False)
    assert all(given.isnan().all() for given in delay.hand_over(views))
