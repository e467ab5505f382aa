"""CompressedAdamW: equal to `adam` under DDP to the last bit, resumable, with a GradScaler and closures."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from tests.failures.test_nonfinite import poison
from tests.hosts.common import flat, mlp, square_loss, wrap
from thinwire import ConfigError
from thinwire.net.launch import Worker, run_local
from thinwire.optim import CompressedAdamW

EXCHANGE = "topk(ratio=0.1)"
METHOD = f"adam(exchange={EXCHANGE}, warmup=3, refresh=2)"
STEPS = 9


def made(model: nn.Module, **options: object) -> CompressedAdamW:
    given = {"exchange": EXCHANGE, "warmup": 3, "refresh": 2, "dense_below": 64, **options}
    return CompressedAdamW(model.named_parameters(), 0.01, **given)


def under_ddp(
    rank: int, *, scaled: bool = False, clip: float | None = None, fused: bool | None = None
) -> torch.Tensor:
    model = wrap(mlp(), bucket_cap_mb=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)
    given = scaler if scaled else None
    session = thinwire.attach(model, METHOD, optimizer=optimizer, dense_below=64, scaler=given)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(square_loss(model, rank, step)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    session.detach()
    return flat(model)


def alone(rank: int, *, closures: bool = False, **options: object) -> torch.Tensor:
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + rank)  # rank 0's count
    optimizer = made(model, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):

        def closure(now: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = square_loss(model, rank, now)
            loss.backward()
            return loss

        if closures:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        schedule.step()
    sent = optimizer.session.metrics()["bytes_sent"]
    assert sent > 0
    optimizer.session.detach()
    assert not optimizer._optimizer_step_pre_hooks
    return flat(model)


def with_a_scaler(rank: int, *, clip: float | None = 0.05, fused: bool | None = None) -> torch.Tensor:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    optimizer = made(model, scaler=scaler, fused=fused)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(square_loss(model, rank, step)).backward()
        optimizer.average()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    optimizer.session.detach()
    return flat(model)


def both(worker: Worker) -> dict[str, torch.Tensor]:
    torch.optim.AdamW([torch.zeros(1)])  # torch adds its hooks to a class when it is first used
    return {
        "ddp": under_ddp(worker.rank),
        "alone": alone(worker.rank),
        "closures": alone(worker.rank, closures=True),
        "ddp scaled": under_ddp(worker.rank, scaled=True, clip=0.05),
        "scaled": with_a_scaler(worker.rank),
        "foreach": alone(worker.rank, foreach=True),
        "ddp fused": under_ddp(worker.rank, fused=True),
        "fused": alone(worker.rank, fused=True),
        "ddp fused and scaled": under_ddp(worker.rank, scaled=True, fused=True),
        "fused and scaled": with_a_scaler(worker.rank, clip=None, fused=True),
    }


def test_it_equals_the_hook_of_attach_bit_for_bit() -> None:
    first, second = run_local(both, 2, timeout=400)
    for name in first:
        assert torch.equal(first[name], second[name]), f"{name}: replicas differ"
    assert torch.equal(first["ddp"], first["alone"])
    assert torch.equal(first["ddp"], first["closures"])
    assert torch.equal(first["ddp scaled"], first["scaled"])
    assert torch.equal(first["ddp fused"], first["fused"])
    assert torch.equal(first["ddp fused and scaled"], first["fused and scaled"])
    for name in ("foreach", "fused", "fused and scaled"):
        assert torch.allclose(first["alone"], first[name], atol=1e-5), name
    assert not torch.equal(first["ddp"], first["scaled"])
    assert (first["alone"] - flat(mlp())).abs().max() > 0.02


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        square_loss(model, rank, step).backward()
        optimizer.step()


def resumed(worker: Worker, folder: Path) -> list[bool]:
    """Five steps and five more from a file of this rank, or from a Checkpointer, or ten at once."""
    ends: list[torch.Tensor] = []
    for part in ("straight", "file", "checkpointer"):
        model = mlp()
        optimizer = made(model)
        keeper = thinwire.Checkpointer(folder, optimizer.session, model, optimizer, every=5)
        file = folder / f"own-{worker.rank}.pt"
        if part == "straight":
            steps(model, optimizer, worker.rank, range(5))
            keeper.steps = 5
            keeper.save()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            keeper.wait()
        elif part == "file":
            kept = torch.load(file, weights_only=True)
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        else:
            assert keeper.load_latest() == 5
        assert optimizer.session.step == 5
        steps(model, optimizer, worker.rank, range(5, 10))
        optimizer.session.detach()
        ends.append(flat(model))
    return [torch.equal(ends[0], end) for end in ends]


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert run_local(resumed, 2, tmp_path, timeout=400) == [[True] * 3] * 2


def odd_cases(worker: Worker) -> None:
    plain = mlp()
    with pytest.raises(ConfigError, match="named_parameters"):
        CompressedAdamW(plain.parameters())
    shard = torch.zeros(3)
    shard.to_local = lambda: shard
    with pytest.raises(ConfigError, match=r"'spread' is sharded.*thinwire\.attach"):
        CompressedAdamW([("spread", shard)])
    model = mlp()
    named = list(model.named_parameters())
    named[0][1].requires_grad_(False)
    groups = [{"params": named[:4], "lr": 0.02}, {"params": named[4:], "weight_decay": 0.0}]
    optimizer = CompressedAdamW(groups, warmup=2, dense_below=64)
    with pytest.raises(ConfigError, match="make another CompressedAdamW"):
        optimizer.add_param_group({"params": [("more", torch.zeros(3))]})
    before = copy.deepcopy([parameter.detach() for _, parameter in named])
    for step in range(4):
        optimizer.zero_grad()
        square_loss(model, worker.rank, step).backward()
        if worker.rank:
            named[2][1].grad = None  # this rank has no gradient for it: it counts as zero
        optimizer.step()
    moved = [not torch.equal(old, new) for old, (_, new) in zip(before, named, strict=True)]
    assert moved == [False] + [True] * (len(named) - 1)
    # The state of torch's own AdamW: the warm-up starts again.
    torchs = torch.optim.AdamW(plain.parameters(), lr=0.5)
    square_loss(plain, 0, 0).backward()
    torchs.step()
    fresh = made(mlp())
    fresh.load_state_dict(torchs.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.5
    assert fresh.session.step == 0
    for each in (optimizer, fresh):
        each.session.detach()


def test_groups_missing_gradients_and_states_of_torch() -> None:
    run_local(odd_cases, 2, timeout=400)


def skipped(worker: Worker, fused: bool) -> None:
    """A scaler that judged this rank's gradients alone would skip a step on one rank only."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    net = mlp()
    scaled = made(net, scaler=scaler, exchange="efsign", warmup=2, refresh=None, fused=fused)
    scaler.scale(square_loss(net, worker.rank, 0)).backward()
    with pytest.raises(ConfigError, match=r"optimizer\.average\(\)"):
        scaler.step(scaled)
    for told in ("grad_scale", "found_inf") if fused else ():
        delattr(scaled, told)  # a GradScaler leaves them behind if step() raises
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled.session.engine._scaler = scaler
    for step in range(6):
        bad = step in (1, 4)
        hook = poison(net, 2, torch.nan) if bad and worker.rank == 1 else None
        start, count = flat(net), scaled.session.step
        scaled.zero_grad()
        scaler.scale(square_loss(net, worker.rank, step)).backward()
        scaled.average()
        scaler.step(scaled)
        scaler.update()
        if hook is not None:
            hook.remove()
        assert torch.equal(start, flat(net)) == bad
        assert scaled.session.step == count + (not bad)
    scaled.session.detach()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_a_step_on_all_ranks_or_on_none(fused: bool) -> None:
    run_local(skipped, 2, fused, timeout=400)
