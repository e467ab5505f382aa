"""`adam` under DDP, with torch's own optimizers, a GradScaler and a non-finite gradient."""

import copy

import pytest
import torch
from torch import nn

import thinwire
from tests.failures.test_nonfinite import poison
from tests.hosts.common import flat, mlp, square_loss, wrap
from tests.hosts.fsdp import loss_of, mesh_2x2, sharded
from tests.hosts.fsdp import shards as fsdp_shards
from tests.hosts.fsdp import train as fsdp_train
from thinwire import ConfigError
from thinwire.core.shards import local
from thinwire.net.launch import Worker, run_local

METHOD = "adam(exchange=topk(ratio=0.1), warmup=3, refresh=2)"
STEPS = 9


def ddp_steps(worker: Worker) -> dict[str, object]:
    results: dict[str, object] = {}
    for name, overlap, scaled, fused in (
        ("plain", True, False, False),
        ("blocking", False, False, False),
        ("scaled", True, True, False),
        ("fused", True, False, True),
        ("fused and scaled", True, True, True),
        ("scaled and clipped", True, True, False),
        ("fused, scaled and clipped", True, True, True),
    ):
        model = wrap(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)
        session = thinwire.attach(
            model,
            METHOD,
            overlap=overlap,
            optimizer=optimizer,
            scaler=scaler if scaled else None,
            dense_below=64,
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(square_loss(model, worker.rank, step)).backward()
            if "clipped" in name:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        results[name] = flat(model)
        results[f"gradients, {name}"] = flat([p.grad for p in model.parameters()])
        counts = {float(state["step"]) for state in optimizer.state.values()}
        assert counts == {float(sum(session.method.is_exact(step) for step in range(STEPS)))}
        session.detach()
        optimizer.step()  # torch's own again
        assert {float(state["step"]) for state in optimizer.state.values()} == {counts.pop() + 1}
    return results


def test_under_ddp_with_schedulers_and_a_scaler() -> None:
    first, second = run_local(ddp_steps, 2, timeout=400)
    for name in first:
        assert torch.equal(first[name], second[name]), f"{name}: replicas differ"
    assert torch.equal(first["plain"], first["blocking"])
    for name in ("scaled", "fused", "fused and scaled"):
        assert torch.allclose(first["plain"], first[name], atol=1e-5), name
        # torch's fused step leaves gradients unscaled as well, with and without unscale_()
        assert torch.allclose(first["gradients, plain"], first[f"gradients, {name}"], atol=1e-5), name
    assert torch.allclose(first["scaled and clipped"], first["fused, scaled and clipped"], atol=1e-5)
    assert not torch.allclose(first["scaled"], first["scaled and clipped"], atol=1e-3)
    assert (first["plain"] - flat(mlp())).abs().max() > 0.02


def a_bad_number(worker: Worker, fused: bool) -> torch.Tensor:
    """A non-finite gradient on one rank, in the warm-up and after it: the scaler skips the step on all.

    A fused optimizer skips it by itself, in a step that is called.
    """
    model = wrap(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    session = thinwire.attach(
        model, "adam(exchange=efsign, warmup=2)", optimizer=optimizer, scaler=scaler, dense_below=64
    )
    for step in range(9):
        bad = step in (0, 1, 3, 7)
        hook = poison(model.module, 2, torch.nan) if bad and worker.rank == 1 else None
        before, count = flat(model), session.step
        optimizer.zero_grad()
        scaler.scale(square_loss(model, worker.rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        if hook is not None:
            hook.remove()
        assert torch.equal(before, flat(model)) == bad
        assert session.step == count + (not bad)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    session.detach()
    return flat(model)


@pytest.mark.parametrize("fused", [False, True])
def test_a_non_finite_gradient_leaves_no_trace(fused: bool) -> None:
    first, second = run_local(a_bad_number, 2, fused, timeout=400)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def resumed(worker: Worker) -> bool:
    """Five steps and five more from the checkpoints of session and optimizer, or ten at once."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            square_loss(model, worker.rank, step).backward()
            optimizer.step()

    kept: dict[str, object] = {}
    straight: torch.Tensor | None = None
    for part in ("straight", "resumed"):
        module = mlp()
        if part == "resumed":
            module.load_state_dict(kept["model"])
        model = wrap(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = thinwire.attach(model, METHOD, optimizer=optimizer, dense_below=64)
        if part == "straight":
            run(model, optimizer, range(5))
            kept = {"model": module.state_dict(), "session": session.state_dict()}
            kept = copy.deepcopy({**kept, "adam": optimizer.state_dict()})
        else:
            optimizer.load_state_dict(kept["adam"])
            session.load_state_dict(kept["session"])
        run(model, optimizer, range(5, 10))
        session.detach()
        if straight is None:
            straight = flat(model)
    return torch.equal(straight, flat(model))


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    assert run_local(resumed, 2, timeout=400) == [True, True]


def without(worker: Worker) -> None:
    model = wrap(mlp())
    with pytest.raises(ConfigError, match=r"give torch\.optim\.AdamW as optimizer"):
        thinwire.attach(model, "adam")
    with pytest.raises(ConfigError, match="not of SGD"):
        thinwire.attach(model, "adam", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_is_needed() -> None:
    run_local(without, 2, timeout=400)


def on_shards(worker: Worker, fused: bool) -> tuple[list[torch.Tensor], float]:
    """With an exact exchange and a second moment frozen after three steps, on 2 x 2 ranks."""
    mesh = mesh_2x2()
    model = sharded(mesh["shard"])
    names = dict(model.named_parameters())
    biases = [name for name in names if name.endswith("bias")]
    groups = [
        {"params": [names[name] for name in names if name not in biases], "weight_decay": 0.1},
        {"params": [names[name] for name in biases], "lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4, fused=fused)
    group = mesh["replicate"].get_group()
    method = "adam(exchange=dense, warmup=3)"
    session = thinwire.attach(model, method, optimizer=optimizer, process_group=group, dense_below=0)
    frozen: list[torch.Tensor] = []
    for step in range(7):
        fsdp_train(model, [step], optimizer=optimizer)
        second = [local(optimizer.state[p]["exp_avg_sq"]).clone() for p in optimizer.state]
        if step == 2:
            frozen = second
    session.detach()
    assert all(torch.equal(a, b) for a, b in zip(frozen, second, strict=True))
    return fsdp_shards(model), float(next(iter(optimizer.state.values()))["step"])


def test_on_a_sharded_model() -> None:
    """With groups that have their own rates, decays and second betas."""
    plain, fused = (run_local(on_shards, 4, fused, timeout=400) for fused in (False, True))
    for ranks in (plain, fused):
        for replica, other in ((0, 2), (1, 3)):
            assert all(torch.equal(a, b) for a, b in zip(ranks[replica][0], ranks[other][0], strict=True))
        assert {steps for _, steps in ranks} == {3.0}
    for (shards, _), (others, _) in zip(plain, fused, strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(shards, others, strict=True))


def on_shards_with_a_scaler(worker: Worker, fused: bool) -> list[torch.Tensor]:
    """A number that is not finite in the warm-up, and in the first and in a later frozen step."""
    mesh = mesh_2x2()
    model = sharded(mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    group = mesh["replicate"].get_group()
    method = "adam(exchange=dense, warmup=3)"
    options = {"optimizer": optimizer, "process_group": group, "scaler": scaler, "dense_below": 0}
    session = thinwire.attach(model, method, **options)
    for step in range(9):
        bad = step in (1, 4, 6)
        before, count = fsdp_shards(model), session.step
        optimizer.zero_grad()
        scaled = scaler.scale(loss_of(model, step))
        (scaled * torch.nan if bad and worker.rank == 1 else scaled).backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, fsdp_shards(model), strict=True))
        assert (same, session.step) == (bad, count + (not bad)), step
    session.detach()
    return fsdp_shards(model)


def test_on_a_sharded_model_with_a_scaler() -> None:
    plain, fused = (run_local(on_shards_with_a_scaler, 4, fused, timeout=400) for fused in (False, True))
    for shards, others in zip(plain, fused, strict=True):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(shards, others, strict=True))
