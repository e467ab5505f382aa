"""FSDP2 with one replica on all ranks (a compressed reduce-scatter), and schedules between replicas."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import thinwire
from tests.hosts.fsdp import Net, gathered, loss_of, mesh_2x2, restored, same, sgd, sharded, shards, train
from tests.hosts.test_fsdp import assert_all_true, refused
from thinwire.core.shards import local
from thinwire.errors import ConfigError, StateError, ThinwireError
from thinwire.net.launch import Worker, run_local

SCATTERS = ("dense", "fp16", "bf16", "qsgd(bits=8)", "natural", "terngrad", "signsgd")


def gradients(model: Net) -> torch.Tensor:
    model.zero_grad()
    loss_of(model, 0).backward()
    return torch.cat([local(p.grad).flatten() for p in model.parameters() if p.grad is not None])


def error_of(given: torch.Tensor, exact: torch.Tensor) -> float:
    sums = torch.stack([(given - exact).square().sum(), exact.square().sum()])
    dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


def one_replica(worker: Worker) -> dict[str, bool]:
    mesh = init_device_mesh("cpu", (4,))
    exact = gradients(sharded(mesh))
    found = {}
    bounds = {"dense": 1e-6, "fp16": 1e-3, "bf16": 5e-3, "qsgd(bits=8)": 2e-2, "natural": 0.5}
    bytes_sent = {}
    for method in SCATTERS:
        model = sharded(mesh)
        session = thinwire.attach(model, method, dense_below=0)
        found[method] = error_of(gradients(model), exact) <= bounds.get(method, 2.0)
        bytes_sent[method] = session.meter.sent_bytes
        train(model, range(3))
        found[f"{method} counts"] = session.meter.steps == 4
        session.detach()
        found[f"{method} detached"] = not gradients(sharded(mesh)).sub(exact).any()
    found["bytes"] = (
        bytes_sent["bf16"] < 0.6 * bytes_sent["dense"] and bytes_sent["signsgd"] < 0.2 * bytes_sent["dense"]
    )

    # Small modules go dense, here all of them; mixed precision reduces in its own type.
    model = sharded(mesh)
    session = thinwire.attach(model, "signsgd", dense_below=10**6)
    found["dense below"] = error_of(gradients(model), exact) < 1e-6
    session.detach()
    found["plain again"] = error_of(gradients(model), exact) < 1e-6
    for dtype in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
        reduced = gradients(sharded(mesh, policy=policy))
        model = sharded(mesh, policy=policy)
        session = thinwire.attach(model, "qsgd(bits=8)", dense_below=0)
        found[f"reduced in {dtype}"] = error_of(gradients(model), reduced) < 0.05
        session.detach()

    one_bad_number(worker, mesh, found)
    again, session = resumed(mesh, found)
    found["no factor"] = _with_a_factor(again)
    session.detach()
    optimizer = sgd(again)
    for method, nearest in (
        ("topk", "qsgd"),
        ("efsign", "signsgd"),
        ("powersgd", "qsgd"),
        ("localsgd", "qsgd"),
    ):
        call = lambda method=method: thinwire.attach(again, method, optimizer=optimizer)  # noqa: E731
        found[f"{method} refused"] = refused(ConfigError, f"nearest method that works .*'{nearest}", call)
    return found


def one_bad_number(worker: Worker, mesh: DeviceMesh, found: dict[str, bool]) -> None:
    """In one module, which comes first or last: there is nothing to step on in any module and shard."""

    def poison(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        bad = torch.zeros_like(inputs[0])
        bad[0, 0] = torch.inf
        return inputs[0] + bad

    for place, dense_below, reentrant in (
        ("blocks.1", 0, None),
        ("stem", 0, None),
        ("blocks.1", 500, None),
        ("blocks.1", 0, True),
    ):
        model = sharded(mesh, Net(reentrant=reentrant))
        session = thinwire.attach(model, "qsgd(bits=8)", dense_below=dense_below)
        train(model, range(2))
        handle = model.get_submodule(place).register_forward_pre_hook(poison) if worker.rank == 2 else None
        model.zero_grad()
        loss_of(model, 2).backward()
        if handle is not None:
            handle.remove()
        label = f"{place}, dense below {dense_below}, reentrant={reentrant}"
        grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
        found[f"{label}: nothing to step on"] = all(bool(grad.isnan().all()) for grad in grads)
        found[f"{label}: not counted"] = session.step == 2 and session.meter.skipped_steps == 1
        trained = train(model, range(3, 5))
        found[f"{label}: goes on"] = session.step == 4 and all(bool(p.isfinite().all()) for p in trained)
        session.detach()


def resumed(mesh: DeviceMesh, found: dict[str, bool]) -> tuple[Net, thinwire.Session]:
    """The random numbers of a step belong to its number, which a checkpoint keeps."""
    model = sharded(mesh)
    session = thinwire.attach(model, "qsgd(bits=2)", dense_below=0)
    optimizer = sgd(model)
    train(model, range(2), optimizer=optimizer)
    saved, weights, moments = session.state_dict(), shards(model), copy.deepcopy(optimizer.state_dict())
    straight = train(model, range(2, 4), optimizer=optimizer)
    session.detach()
    again = sharded(mesh)
    optimizer = restored(again, weights, moments)
    session = thinwire.attach(again, "qsgd(bits=2)", dense_below=0)
    session.load_state_dict(saved)
    found["resumes"] = same(train(again, range(2, 4), optimizer=optimizer), straight)
    return again, session


def _with_a_factor(model: Net) -> bool:
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(8.0)
    return refused(ThinwireError, "set_gradient_divide_factor", lambda: loss_of(model, 0).backward())


def test_one_replica_reduces_and_scatters_coded_gradients() -> None:
    assert_all_true(run_local(one_replica, 4))


def schedules(worker: Worker) -> dict[str, bool]:
    mesh = mesh_2x2()
    group = mesh["replicate"].get_group()
    found = {}
    for method in ("localsgd(every=2)", "pqasgd(every=2, bits=8)", "diloco(every=2, fragments=2)"):
        model = sharded(mesh["shard"])
        with torch.no_grad():  # the first replica's parameters are the ones to begin with
            local(model.stem.weight).add_(worker.rank // 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = thinwire.attach(model, method, optimizer=optimizer, process_group=group, dense_below=0)
        found[f"{method} begins"] = gathered(shards(model), group)
        train(model, range(3), optimizer=optimizer)
        found[f"{method} drifts"] = not gathered(shards(model), group)
        saved = session.state_dict()
        straight = train(model, range(3, 6), optimizer=optimizer)
        session.sync()
        found[f"{method} agrees"] = gathered(shards(model), group) and session.spread() == 0.0
        session.detach()
        again = sharded(mesh["shard"])
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
        session = thinwire.attach(again, method, optimizer=optimizer, process_group=group, dense_below=0)
        session.load_state_dict(saved)
        found[f"{method} resumes"] = same(train(again, range(3, 6), optimizer=optimizer), straight)
        states = [None] * 4
        dist.all_gather_object(states, saved)
        found[f"{method}: another shard"] = refused(
            StateError,
            "another model",
            session.load_state_dict,
            states[worker.rank ^ 1],
        )
        session.detach()

    # Averaging momenta, and local SGD of one step, which is the mean of the gradients.
    native = train(sharded(mesh), range(3), optimizer=None)
    model = sharded(mesh["shard"])
    optimizer = sgd(model)
    session = thinwire.attach(
        model,
        "localsgd(every=1, momentum='average')",
        optimizer=optimizer,
        process_group=group,
        dense_below=0,
    )
    trained = train(model, range(3), optimizer=optimizer)
    found["every step"] = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(trained, native, strict=True))
    session.detach()
    return found


def test_schedules_average_the_shards_of_the_replicas() -> None:
    assert_all_true(run_local(schedules, 4))
