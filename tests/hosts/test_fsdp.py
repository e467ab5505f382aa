"""FSDP2 with replicas: 2 replicas of 2 shards each, on four processes."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import thinwire
from tests.hosts.common import BUSY
from tests.hosts.fsdp import (
    Net,
    by_hand,
    gathered,
    loss_of,
    mesh_2x2,
    restored,
    same,
    sgd,
    sharded,
    shards,
    train,
)
from thinwire.core.shards import local
from thinwire.errors import ConfigError, DisagreementError, StateError, ThinwireError
from thinwire.net.launch import Worker, run_local


def assert_all_true(per_rank: list[dict[str, bool]]) -> None:
    assert per_rank[0]
    for rank, checks in enumerate(per_rank):
        assert not [name for name, holds in checks.items() if not holds], f"rank {rank}"


def dense_is_native(worker: Worker) -> dict[str, bool]:
    mesh = mesh_2x2()
    group = mesh["replicate"].get_group()
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    runs = {
        "plain": {},
        "accumulation and clipping": {"accumulate": 2, "clip": 0.1},
        "mixed precision": {"policy": bf16},
        "a module used twice": {"net": {"reuse": True}},
        "activation checkpoints": {"net": {"reentrant": False}},
        "reentrant activation checkpoints": {"net": {"reentrant": True}},
        "a module used twice, with reentrant checkpoints": {"net": {"reuse": True, "reentrant": True}},
    }
    found = {}
    for name, options in runs.items():
        policy, net = options.pop("policy", None), options.pop("net", {})
        native = train(sharded(mesh, Net(**net), policy), range(3), **options)
        for overlap in (True, False) if name == "plain" else (True,):
            model = sharded(mesh["shard"], Net(**net), policy)
            session = thinwire.attach(model, "dense", process_group=group, overlap=overlap)
            trained = train(model, range(3), **options)
            found[f"{name}, overlap={overlap}"] = same(trained, native) and session.meter.steps == 3
            session.detach()
    return found


def test_dense_equals_native_hsdp_bit_for_bit() -> None:
    assert_all_true(run_local(dense_is_native, 4))


def methods_by_hand(worker: Worker) -> dict[str, bool]:
    mesh = mesh_2x2()
    group, mark = mesh["replicate"].get_group(), f"[shard {worker.rank % 2} of 2]"
    found = {}
    for method in (*BUSY, "topk(ratio=0.2, scope='model')", "laq"):
        expected = by_hand(mesh, Net(), method, range(3))
        for overlap in (True, False) if method == BUSY[2] else (True,):
            model = sharded(mesh["shard"])
            session = thinwire.attach(model, method, process_group=group, overlap=overlap, dense_below=0)
            trained = train(model, range(3))
            # Buckets change what is summed together, and so the order of a mean's few roundings.
            close = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(trained, expected, strict=True))
            found[f"{method}, overlap={overlap}"] = close and gathered(trained, group)
            names = set(session.residuals())
            remembers = "topk" in method or "block" in method or "powersgd" in method
            found[f"{method} residuals"] = bool(names) == remembers and all(mark in name for name in names)
            session.detach()
    return found


def test_every_kind_of_method_averages_the_shards_as_a_session_by_hand_does() -> None:
    assert_all_true(run_local(methods_by_hand, 4))


def resumes(worker: Worker) -> dict[str, bool]:
    mesh = mesh_2x2()
    group = mesh["replicate"].get_group()
    found = {}
    for method in ("topk(ratio=0.2)", "powersgd(rank=1)", "qsgd"):
        model = sharded(mesh["shard"])
        optimizer = sgd(model)
        session = thinwire.attach(model, method, process_group=group, dense_below=0)
        train(model, range(2), optimizer=optimizer)
        saved, weights = session.state_dict(), shards(model)
        moments = copy.deepcopy(optimizer.state_dict())
        straight = train(model, range(2, 4), optimizer=optimizer)
        session.detach()
        again = sharded(mesh["shard"])
        optimizer = restored(again, weights, moments)
        session = thinwire.attach(again, method, process_group=group, dense_below=0)
        session.load_state_dict(saved)
        found[method] = same(train(again, range(2, 4), optimizer=optimizer), straight)
        other = [None] * 4
        dist.all_gather_object(other, saved)
        found[f"{method}: another shard"] = refused(
            StateError, "another model", session.load_state_dict, other[worker.rank ^ 1]
        )
        session.detach()
    return found


def refused(kind: type[Exception], pattern: str, call: Callable[..., object], *args: object) -> bool:
    with pytest.raises(kind, match=pattern):
        call(*args)
    return True


def test_a_resumed_run_continues_bit_for_bit() -> None:
    assert_all_true(run_local(resumes, 4))


def odd_steps(worker: Worker) -> dict[str, bool]:
    mesh = mesh_2x2()
    group = mesh["replicate"].get_group()
    replica, shard = divmod(worker.rank, 2)
    found = {}

    # A step is aborted on all shards if one of them is not finite.
    model = sharded(mesh["shard"])
    session = thinwire.attach(model, "topk(ratio=0.2)", process_group=group, dense_below=0)
    train(model, range(2))
    before = {name: residual.clone() for name, residual in session.residuals().items()}
    weight = model.blocks[0].weight

    def poison(p: torch.Tensor) -> None:
        if replica == 1 and shard == 0:
            local(p.grad)[0, 0] = torch.nan

    session.detach()
    handle = weight.register_post_accumulate_grad_hook(poison)
    saved = session.state_dict()
    session = thinwire.attach(model, "topk(ratio=0.2)", process_group=group, dense_below=0)
    session.load_state_dict(saved)
    loss_of(model, 2).backward()
    after = session.residuals()
    found["aborted"] = session.step == 2
    found["residuals"] = all(torch.equal(after[name], residual) for name, residual in before.items())
    found["nothing to step on"] = all(
        bool(local(p.grad).isnan().all()) for p in model.parameters() if p.grad is not None
    )
    handle.remove()
    session.detach()

    # A parameter that one replica alone uses: the other one counts as zeros and gets the mean.
    model = sharded(mesh["shard"])
    session = thinwire.attach(model, "dense", process_group=group)
    for step in range(3):
        model.zero_grad()
        model.spared = replica == 0
        loss_of(model, step).backward()
    found["unused in one replica"] = gathered([local(p.grad) for p in model.parameters()], group)
    found["unused, but not zero"] = bool(local(model.spare.weight.grad).any())
    model.zero_grad()
    model.spared = True
    loss_of(model, 3).backward()
    found["unused everywhere"] = model.spare.weight.grad is None

    # A pass without synchronisation is no step; one that fails leaves nothing behind.
    steps = session.meter.steps
    model.set_requires_gradient_sync(False)
    loss_of(model, 5).backward()
    found["no step"] = session.meter.steps == steps
    model.set_requires_gradient_sync(True)
    session.detach()

    # A gradient that comes in two parts (a loss in chunks does that), after one that came whole.
    model = sharded(mesh["shard"])
    session = thinwire.attach(model, "dense", process_group=group)
    train(model, range(2))
    early, late = model.blocks[1].weight, model.blocks[0].weight
    (ready,) = early._post_accumulate_grad_hooks.values()
    late.register_post_accumulate_grad_hook(lambda p: ready(early))
    found["used more often"] = refused(ThinwireError, "overlap=False", lambda: loss_of(model, 3).backward())
    session.detach()
    return found


def test_steps_that_are_out_of_the_ordinary() -> None:
    assert_all_true(run_local(odd_steps, 4))


def refusals(worker: Worker) -> dict[str, bool]:
    mesh = mesh_2x2()
    group = mesh["replicate"].get_group()
    model = sharded(mesh["shard"])
    attach = functools.partial(thinwire.attach, process_group=group)
    found = {
        "a hybrid mesh": refused(ConfigError, "itself averages", lambda: attach(sharded(mesh), "topk")),
        "the shards' group": refused(
            ConfigError,
            "another shard",
            lambda: thinwire.attach(model, "topk", process_group=mesh["shard"].get_group()),
        ),
        "no group": refused(ConfigError, "process_group", lambda: thinwire.attach(model, "topk")),
        "auto": refused(ConfigError, "auto", lambda: attach(model, "auto")),
        "lasg": refused(ConfigError, "laq", lambda: attach(model, "lasg")),
        "a part": refused(ConfigError, "whole model", lambda: attach(torch.nn.Sequential(model), "topk")),
    }
    session = attach(model, "dense")
    found["twice"] = refused(ConfigError, "already", lambda: attach(model, "topk"))
    found["skips a forward pass"] = refused(ConfigError, "FSDP", session.wants_gradient)
    session.detach()
    with torch.no_grad():
        local(model.stem.weight).add_(worker.rank // 2)
    session = attach(model, "dense")
    found["other values"] = refused(DisagreementError, "same seed", lambda: loss_of(model, 0).backward())
    session.detach()
    return found


def test_what_cannot_work_is_refused() -> None:
    assert_all_true(run_local(refusals, 4))
