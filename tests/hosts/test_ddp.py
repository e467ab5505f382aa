"""The DDP host: whatever DDP does with its buckets, training equals `session.average` in a plain loop."""

import copy
import logging
import threading

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.hosts.common import (
    BUSY,
    MANY,
    METHODS,
    PROMPT,
    assert_same_everywhere,
    batch,
    buckets_of,
    consents,
    flat,
    mlp,
    reference,
    square_loss,
    train,
    under_ddp,
    wrap,
)
from tests.laws.cohort import Cohort
from thinwire.net.launch import Worker, run_local
from thinwire.net.rank_info import RankInfo

STEPS = range(4)

DDP_OPTIONS: dict[str, dict[str, object]] = {
    "one bucket": {"bucket_cap_mb": 25},
    "many buckets": {"bucket_cap_mb": MANY},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused parameters sought": {"find_unused_parameters": True},
}


def every_option(worker: Worker) -> dict[str, torch.Tensor]:
    """Everything for a few methods, the common case for all."""
    results = {}
    for method in dict.fromkeys((*BUSY, *METHODS)):
        expected = reference(worker, mlp(), method, STEPS)
        for name, options in DDP_OPTIONS.items():
            for overlap in (True, False):
                if method in BUSY or (overlap and name == "bucket views"):
                    label = f"{method}, {name}, overlap={overlap}"
                    results[label] = under_ddp(worker, mlp(), method, STEPS, ddp=options, overlap=overlap)
                    results[f"{label} reference"] = expected
    return results


@pytest.mark.slow
def test_options_of_ddp_and_bucket_rebuilds_change_nothing() -> None:
    """Error feedback would show a lost or misplaced residual at once."""
    assert_same_everywhere(run_local(every_option, 2, timeout=400))


def rebuilds(worker: Worker) -> list[int]:
    model = wrap(mlp())
    session = thinwire.attach(model, "topk(ratio=0.2)")
    counts = []
    for step in range(3):
        square_loss(model, worker.rank, step).backward()
        counts.append(buckets_of(model))
    session.detach()
    return counts


def test_the_buckets_above_are_really_rebuilt() -> None:
    (counts, _) = run_local(rebuilds, 2)
    assert counts[0] == 1, f"one bucket in the first iteration was expected, not {counts}"
    assert counts[-1] >= 4, f"many buckets from the second iteration on were expected, not {counts}"


def four_ranks(worker: Worker) -> dict[str, torch.Tensor]:
    results = {}
    for method in METHODS:
        model = wrap(mlp())
        session = thinwire.attach(model, method)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        results[method] = train(model, worker.rank, STEPS, optimizer=optimizer)
        session.detach()
    return results


def test_four_ranks_end_with_equal_parameters_for_every_method() -> None:
    assert_same_everywhere(run_local(four_ranks, 4, timeout=400))


def plain_and_dense(worker: Worker) -> dict[str, torch.Tensor]:
    results = {}
    for name, options in DDP_OPTIONS.items():
        results[name] = under_ddp(worker, mlp(), "dense", STEPS, ddp=options)
        results[f"{name} reference"] = train(wrap(mlp(), **options), worker.rank, STEPS)
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_dense_is_plain_ddp(size: int) -> None:
    assert_same_everywhere(run_local(plain_and_dense, size, timeout=400), within=0.0 if size == 2 else 1e-6)


# -- models ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(depth=1), mlp(depth=2)
        self.second[0].weight = self.first[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Branches(nn.Module):
    """A trunk, and one branch for each rank: the other's has no gradient here."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(depth=2)
        self.branches = nn.ModuleList([mlp(depth=1), mlp(depth=1), mlp(depth=1)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](self.trunk(x))


class Odd(nn.Module):
    """Frozen layers, an empty parameter, a scalar, two dtypes, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(depth=3), mlp(torch.bfloat16, depth=1)
        self.body[2].requires_grad_(False)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv1d(1, 40, 40)
        nn.init.constant_(self.conv.weight, 0.01)
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.gain * self.body(x)[:, None])[:, :, 0]
        return self.head(x.bfloat16()).float() + self.nothing.sum()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = mlp(depth=2), mlp(depth=2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant))


def branch_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step), rank).square().mean()


def plain_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def odd_models(worker: Worker, methods: tuple[str, ...]) -> dict[str, torch.Tensor]:
    cases = {
        "tied": (Tied(), plain_loss, {}),
        "without gradient": (Branches(), branch_loss, {"find_unused_parameters": True}),
        "without gradient, views": (
            Branches(),
            branch_loss,
            {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        ),
        "frozen, empty, scalar, mixed": (Odd(), plain_loss, {}),
        "checkpointed": (Checkpointed(False), plain_loss, {}),
        "checkpointed, reentrant": (Checkpointed(True), plain_loss, {"static_graph": True}),
        "bf16": (mlp(torch.bfloat16), square_loss, {}),
        "fp16": (mlp(torch.float16), square_loss, {}),
        "fp64": (mlp(torch.float64), square_loss, {}),
    }
    results = {}
    for name, (module, loss, options) in cases.items():
        lazy = ("lag", "laq") if name == "without gradient" else ()
        for method in METHODS if name.startswith("frozen") else (*methods, *lazy):
            label, steps = f"{method}, {name}", STEPS if method in BUSY else range(2)
            results[f"{label} reference"] = reference(worker, module, method, steps, loss=loss)
            results[label] = under_ddp(worker, module, method, steps, loss=loss, ddp=options)
    return results


def test_models_of_all_kinds() -> None:
    assert_same_everywhere(run_local(odd_models, 2, BUSY, timeout=400))


def in_turn(worker: Worker, method: str) -> dict[str, torch.Tensor]:
    """Both ranks use branch 0, then both use branch 1: how far branch 0 goes in the second step."""
    moved: dict[str, torch.Tensor] = {}
    for host in ("ddp", "loop"):
        module = Branches()
        model = wrap(module, find_unused_parameters=True) if host == "ddp" else module
        session = (
            thinwire.attach(model, method, dense_below=0)
            if host == "ddp"
            else thinwire.Session(module.named_parameters(), method, dense_below=0)
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
        for step in range(2):
            before = flat(module.branches[0])
            optimizer.zero_grad()
            model(batch(worker.rank, step), step).square().mean().backward()
            if host == "loop":
                means = session.average({name: p.grad for name, p in module.named_parameters()})
                for name, parameter in module.named_parameters():
                    parameter.grad = means[name]
            optimizer.step()
        moved[host] = flat(module.branches[0]) - before
        moved[f"{host}, all"] = flat(module)
        session.detach()
    return moved


@pytest.mark.parametrize(
    ("method", "owes"), [("dense", False), ("topk(ratio=0.2)", True), ("lag(xi=1e9)", True)]
)
def test_ddp_leaves_alone_what_no_rank_has_used(method: str, owes: bool) -> None:
    """Whatever a method still has for such a parameter: DDP does not look at it, `session.average` does."""
    per_rank = run_local(in_turn, 2, method, timeout=400)
    assert_same_everywhere(per_rank)
    assert not per_rank[0]["ddp"].any()
    assert bool(per_rank[0]["loop"].any()) == owes


# -- loops -------------------------------------------------------------------------------------------------


def loops(worker: Worker, methods: tuple[str, ...]) -> dict[str, torch.Tensor]:
    results = {}
    for method in methods:
        for name, loop in {"no_sync": {"accumulate": 3}, "clipping": {"clip": 0.05}}.items():
            for views in (False, True):
                label = f"{method}, {name}, views={views}"
                options = {"gradient_as_bucket_view": views}
                results[label] = under_ddp(worker, mlp(), method, STEPS, ddp=options, **loop)
                results[f"{label} reference"] = reference(worker, mlp(), method, STEPS, **loop)
    return results


def test_gradient_accumulation_and_clipping() -> None:
    assert_same_everywhere(run_local(loops, 2, BUSY, timeout=400))


def uneven(worker: Worker, methods: tuple[str, ...]) -> dict[str, torch.Tensor]:
    mine = range(3) if worker.rank == 0 else range(6)
    results = {}
    for method in methods:
        model = wrap(mlp())
        session = thinwire.attach(model, method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        with model.join():
            train(model, worker.rank, mine, optimizer=optimizer)
        results[method] = flat(model)
        session.detach()

        def finished_early(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            return square_loss(model, rank, step) * (1.0 if step in mine else 0.0)

        module = mlp()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
        session = thinwire.Session(module.named_parameters(), method)
        for step in range(6):
            optimizer.zero_grad()
            finished_early(module, worker.rank, step).backward()
            session.average({name: p.grad for name, p in module.named_parameters()}, in_place=True)
            optimizer.step()
        results[f"{method} reference"] = flat(module)
        session.detach()
    return results


@pytest.mark.slow
def test_uneven_inputs_under_join() -> None:
    """A rank that has finished goes on sending what it owes; its own gradient counts as zero."""
    assert_same_everywhere(run_local(uneven, 2, tuple(filter(consents, METHODS)), timeout=400))


def scaled(worker: Worker, methods: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """A step that overflows on one rank, in one layer, is as if it had not been; so is the loss scale."""
    results = {}
    for turn, method in enumerate(methods):
        expected = under_ddp(worker, mlp(), method, range(4))
        for bad_layer in (0, 6) if method in BUSY else (6 * (turn % 2),):
            label = f"{method}, bad layer {bad_layer}"
            model = wrap(mlp())
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, growth_factor=4.0)
            session = thinwire.attach(model, method, scaler=scaler)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
            weight = model.module[bad_layer].weight
            scales = []
            for step in (0, 1, 2, -1, 3):
                optimizer.zero_grad()
                hook = None
                if step < 0 and worker.rank == 1:
                    hook = weight.register_hook(
                        lambda grad: (
                            grad.clone().view(-1).index_fill(0, torch.tensor([7]), torch.inf).view_as(grad)
                        )
                    )
                before, memory, count = flat(model), session.sealed(), session.step
                scaler.scale(square_loss(model, worker.rank, step)).backward()
                if hook is not None:
                    hook.remove()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                if step < 0:
                    after = session.sealed()
                    assert not weight.grad.view(-1)[7].isfinite(), f"{label}: the mean is finite"
                    assert torch.equal(before, flat(model)), f"{label}: the step was not skipped"
                    assert session.step == count or not session.engine.remembers, (
                        f"{label}: the step was counted"
                    )
                    for name, kept in memory["state"].items():
                        for field, tensor in kept.items():
                            same = torch.equal(tensor, after["state"][name][field])
                            assert same, f"{label}: {field} of {name} changed"
                    assert scales[-1] == scales[-2] / 2, f"{label}: {scales}"
            assert len(set(scales)) > 2, f"{label}: the scale was to change: {scales}"
            session.detach()
            results[label] = flat(model)
            results[f"{label} reference"] = expected
    return results


@pytest.mark.parametrize("part", range(3))
def test_grad_scaler_skips_alike_and_residuals_follow_its_scale(part: int) -> None:
    """Scales are powers of two, so the trajectory must be that of a run without a scaler, bit for bit."""
    methods = tuple(dict.fromkeys((*PROMPT, *BUSY)))[part::3]
    scale_free = tuple(method for method in methods if follows_a_scale(method))
    assert set(BUSY).intersection(methods) <= set(scale_free)
    assert_same_everywhere(run_local(scaled, 2, scale_free, timeout=400))


def follows_a_scale(method: str) -> bool:
    """Whether four times the gradient gives four times the mean; not so where an option has its unit."""
    ((given,), once, more) = Cohort(method, 1).inputs(0), Cohort(method, 1), Cohort(method, 1)
    plain = once.average([given])[0]
    scaled_ = more.average([{name: 4 * tensor for name, tensor in given.items()}])[0]
    return all(torch.equal(4 * plain[name], scaled_[name]) for name in plain)


def autocast(worker: Worker) -> dict[str, torch.Tensor]:
    results = {}
    for method in METHODS:
        model = wrap(mlp())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        session = thinwire.attach(model, method, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for step in STEPS:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = square_loss(model, worker.rank, step)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm.isfinite(), f"{method}: a gradient norm of {norm}"
            scaler.step(optimizer)
            scaler.update()
        results[method] = flat(model)
        assert not torch.equal(results[method], flat(mlp())), f"{method}: nothing was learned"
        session.detach()
    return results


def test_autocast_with_unscaling_and_clipping() -> None:
    assert_same_everywhere(run_local(autocast, 2))


# -- several ----------------------------------------------------------------------------------------------


def two_models(worker: Worker) -> dict[str, torch.Tensor]:
    """Two models in one backward pass and a third by itself, each with a method of its own."""
    chosen = ("topk(ratio=0.2)", "powersgd(rank=1)", "qsgd(bits=4)")
    models = [wrap(mlp()) for _ in chosen]
    sessions = [thinwire.attach(model, method) for model, method in zip(models, chosen, strict=True)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5) for model in models]
    for step in STEPS:
        for optimizer in optimizers:
            optimizer.zero_grad()
        first, second, third = (square_loss(model, worker.rank, step) for model in models)
        (first + second).backward()
        third.backward()
        for optimizer in optimizers:
            optimizer.step()
    results = {}
    for method, model, session in zip(chosen, models, sessions, strict=True):
        results[method] = flat(model)
        session.detach()
        results[f"{method} reference"] = reference(worker, mlp(), method, STEPS)
    return results


def test_several_models_in_one_process() -> None:
    assert_same_everywhere(run_local(two_models, 2))


def subgroups(worker: Worker) -> dict[str, torch.Tensor]:
    """Two pairs at work at once; then all four together, with an uneven number of groups behind them."""
    torch.distributed.new_group([0, 1, 2])
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    mine = pairs[worker.rank // 2]
    results = {}
    for method in METHODS:
        model = wrap(mlp(), process_group=mine)
        session = thinwire.attach(model, method)
        assert session.rank_info == RankInfo(worker.rank % 2, 2)
        results[f"pair, {method}"] = train(model, worker.rank, STEPS)
        session.detach()
    model = wrap(mlp())
    session = thinwire.attach(model, "topk(ratio=0.2)")
    results["all"] = train(model, worker.rank, STEPS)
    session.detach()
    return results


@pytest.mark.slow
def test_sub_process_groups() -> None:
    per_rank = run_local(subgroups, 4, timeout=400)
    for label, parameters in per_rank[0].items():
        if not consents(label):
            continue
        others = [results[label] for results in per_rank]
        assert torch.equal(parameters, others[1]), f"{label}: ranks 0 and 1 differ"
        assert torch.equal(others[2], others[3]), f"{label}: ranks 2 and 3 differ"
        same = torch.equal(others[0], others[2])
        assert same == (label == "all"), f"{label}: ranks 0 and 2 are {'equal' if same else 'different'}"


# -- attach and detach -------------------------------------------------------------------------------------


def lane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]


def attach_and_detach(worker: Worker) -> dict[str, torch.Tensor]:
    results = {}
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for method in filter(consents, METHODS):
        session = thinwire.attach(model, method)
        with pytest.raises(thinwire.ConfigError, match="already"):
            thinwire.attach(model, method)
        results[f"{method} attached"] = train(model, worker.rank, STEPS, optimizer=optimizer)
        session.detach()
        session.detach()
        assert not lane_threads(), f"left behind: {lane_threads()}"
        assert session.meter.steps == len(STEPS)
        session.sealed()
        plain = wrap(copy.deepcopy(model.module))
        again = torch.optim.SGD(plain.parameters(), lr=0.2)
        results[f"{method} detached"] = train(model, worker.rank, STEPS, optimizer=optimizer)
        results[f"{method} detached reference"] = train(plain, worker.rank, STEPS, optimizer=again)
        assert session.meter.steps == len(STEPS)
    return results


def test_detach_gives_plain_ddp_back_and_attach_works_again() -> None:
    assert_same_everywhere(run_local(attach_and_detach, 2))


def refusals(worker: Worker) -> None:
    with pytest.raises(
        thinwire.ConfigError, match=r"a bare model \(Sequential\).*DistributedDataParallel model"
    ):
        thinwire.attach(mlp(), "dense")
    model = wrap(mlp())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(thinwire.ConfigError, match="has a communication hook already"):
        thinwire.attach(model, "dense")
    late = wrap(mlp())
    late.module[0].weight.requires_grad_(False)
    session = thinwire.attach(late, "dense")
    late.module[0].weight.requires_grad_(True)
    with pytest.raises(thinwire.ThinwireError, match="freeze parameters before"):
        square_loss(late, worker.rank, 0).backward()
    session.detach()
    assert not lane_threads()


def test_what_attach_refuses() -> None:
    run_local(refusals, 2)


def destroyed_first(worker: Worker) -> None:
    model = wrap(mlp())
    session = thinwire.attach(model, "topk")
    train(model, worker.rank, STEPS)
    torch.distributed.destroy_process_group()
    session.detach()
    assert not lane_threads()


def never_detached(worker: Worker) -> None:
    model = wrap(mlp())
    thinwire.attach(model, "topk")
    train(model, worker.rank, STEPS)


@pytest.mark.parametrize("function", [destroyed_first, never_detached])
def test_careless_endings(function) -> None:
    run_local(function, 2)


def announced(worker: Worker) -> tuple[str, int]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("thinwire").addHandler(handler)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    model = wrap(mlp())
    session = thinwire.attach(model, "dense")
    for step in range(3):
        square_loss(model, worker.rank, step).backward()
    buckets = buckets_of(model)
    session.detach()
    return "\n".join(lines), buckets


def test_the_line_at_the_start_counts_the_operations_of_the_final_buckets() -> None:
    line, buckets = run_local(announced, 2)[0]
    assert buckets > 1
    assert line.count("\n") == 0
    assert f"in {buckets} operations, 100 % of dense's" in line


def compiled(worker: Worker) -> dict[str, torch.Tensor]:
    """`torch.compile` around DDP, as its documentation recommends; DDP's buckets split the graph."""
    results = {}
    for method in ("topk(ratio=0.2)", "qsgd", "powersgd(rank=1)"):
        big, options = mlp(width=600), {"bucket_cap_mb": 2}
        model = wrap(copy.deepcopy(big), **options)
        session = thinwire.attach(model, method)
        fast = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
        results[method] = train(fast, worker.rank, STEPS, optimizer=optimizer)
        results[f"{method} reference"] = under_ddp(worker, big, method, STEPS, ddp=options)
        assert buckets_of(model) > 1
        session.detach()
    return results


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_model_itself() -> None:
    assert_same_everywhere(run_local(compiled, 2, timeout=400), within=1e-5)


def skipping(worker: Worker) -> dict[str, torch.Tensor]:
    """Ranks that are not asked make no forward pass; a model in several buckets."""
    results = {}
    for skip in (True, False):
        model = wrap(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = thinwire.attach(model, "lag(rule='ps')", optimizer=optimizer)
        computed = 0
        for _ in range(20):
            if not skip or session.wants_gradient():
                computed += 1
                optimizer.zero_grad()
                square_loss(model, worker.rank, 0).backward()
            else:
                session.skip_gradient()
            optimizer.step()
        assert (computed < 20) == skip
        results["lag" if skip else "lag reference"] = flat(model)
        session.detach()
    return results


def test_skipped_gradients_change_nothing() -> None:
    assert_same_everywhere(run_local(skipping, 3))


def with_buffers(worker: Worker) -> str:
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = thinwire.attach(model, "lag(rule='ps')", optimizer=optimizer)
    with pytest.raises(thinwire.ConfigError) as error:
        session.wants_gradient()
    session.detach()
    return str(error.value)


def test_no_forward_pass_is_skipped_where_ddp_needs_all_ranks() -> None:
    assert "broadcast_buffers=False" in run_local(with_buffers, 2)[0]
