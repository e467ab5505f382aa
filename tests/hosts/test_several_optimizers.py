"""Muon and AdamW side by side on real processes: schedules, methods that average gradients, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire
from tests.averaging.test_several_optimizers import Several
from tests.hosts import fsdp
from tests.hosts.common import batch, flat, loaded_together, mlp, muon_and_adamw, square_loss, wrap
from thinwire import ConfigError, StateError, ThinwireError
from thinwire.integrations.rank_states import RankStates
from thinwire.net.launch import Worker, run_local, start_local
from thinwire.net.roll_call import GRACE_SECONDS
from thinwire.optim import CompressedAdamW

Optimizers = Sequence[torch.optim.Optimizer]
ORDERS = ([0, 1], [1, 0])
# The first three are those whose replicas differed by 0.013, or which failed in their warm-up.
SCHEDULES = (
    "localsgd(every=3)",
    "diloco(every=3)",
    "postlocal(every=3, warmup=3)",
    "pqasgd(every=4, fragments=2, overlap=1)",
    "localsgd(every=3, momentum='average')",
)
STEPS = 9
TIMEOUT = 16.0


def train(
    model: nn.Module, optimizers: Optimizers, rank: int, steps: range, order: Sequence[int] = (0, 1)
) -> torch.Tensor:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        square_loss(model, rank, step).backward()
        for which in order:
            optimizers[which].step()
    return flat(model)


# -- schedules ---------------------------------------------------------------------------------------------


def scheduled(worker: Worker) -> dict[str, list[torch.Tensor]]:
    """Every schedule in both orders, on a bare and on a DDP model; and in lock-step."""
    found: dict[str, list[torch.Tensor]] = {}
    for method in SCHEDULES:
        found[method] = []
        for order in ORDERS:
            for wrapped in (False, True):
                module = mlp()
                model = wrap(module) if wrapped else module
                optimizers = muon_and_adamw(module)
                session = thinwire.attach(model, method, optimizer=optimizers, dense_below=64)
                found[method].append(train(model, optimizers, worker.rank, range(STEPS), order))
                assert session.step == STEPS
                session.sync()
                found[method].append(flat(module))
                session.detach()
        cohort = Several(method, worker.size, muon_and_adamw, [0, 1])
        cohort.train(range(STEPS))
        found[method].append(flat(cohort.models[worker.rank]))
        cohort.sync()
        found[method].append(flat(cohort.models[worker.rank]))
    return found


def test_replicas_are_equal_and_neither_order_nor_host_matters() -> None:
    """Two ranks add up alike, so real processes and lock-step agree to the last bit or nearly so."""
    first, second = run_local(scheduled, 2, timeout=400)
    for method in SCHEDULES:
        for mine, theirs in ((first[method], second[method]),):
            for own, synced in zip(mine[::2], mine[1::2], strict=True):
                assert float((own - mine[-2]).abs().max()) < 1e-6, method
                assert float((synced - mine[-1]).abs().max()) < 1e-6, method
            assert all(torch.equal(each, mine[0]) for each in mine[:-2:2]), method
            assert all(torch.equal(each, mine[1]) for each in (*mine[1:-2:2], *theirs[1:-2:2])), method
        if "fragments" not in method:  # a sync round was after the last step
            assert torch.equal(first[method][0], second[method][0]), method


def zeroed_between(worker: Worker) -> list[torch.Tensor]:
    """`postlocal` scales what AdamW has added to its second moments, also if its gradients are gone soon."""
    found = []
    for early in (False, True):
        model = mlp()
        muon, adamw = muon_and_adamw(model)
        session = thinwire.attach(
            model, "postlocal(every=50, warmup=2)", optimizer=[muon, adamw], dense_below=64
        )
        for step in range(6):
            square_loss(model, worker.rank, step).backward()
            adamw.step()
            if early:
                adamw.zero_grad()
            muon.step()
            for optimizer in (muon, adamw):
                optimizer.zero_grad()
        moments = [state["exp_avg_sq"] for state in adamw.state.values()]
        found += [flat(model), flat(moments)]
        session.detach()
    return found


def test_gradients_may_be_zeroed_between_the_steps() -> None:
    for parameters, moments, others, other_moments in run_local(zeroed_between, 2, timeout=400):
        assert torch.equal(moments, other_moments)
        assert torch.equal(parameters, others)


def second_pass(worker: Worker, how: str) -> str:
    """In a warm-up on gradients: a backward pass between the two steps, as adversarial networks have it."""
    model = mlp()
    muon, adamw = muon_and_adamw(model)
    warmup = 0 if how == "no warm-up" else 3
    method = f"postlocal(every=4, warmup={warmup})"
    session = thinwire.attach(model, method, optimizer=[muon, adamw], dense_below=64)

    def closure() -> float:
        adamw.zero_grad()
        loss = square_loss(model, worker.rank, 1)
        loss.backward()
        return float(loss.detach())

    square_loss(model, worker.rank, 0).backward()
    try:
        muon.step()
        if how == "closure":
            adamw.step(closure)
        else:
            closure()
            adamw.step()
    except ThinwireError as error:
        return str(error)
    finally:
        session.detach()
    return ""


@pytest.mark.parametrize("how", ["two passes", "closure", "no warm-up"])
def test_a_gradient_that_was_not_averaged_in_the_warm_up_is_an_error_on_every_rank(how: str) -> None:
    for said in run_local(second_pass, 2, how, timeout=400):
        if how == "no warm-up":
            assert not said
        else:
            assert said.startswith(
                "the gradient of '0.bias' was computed after postlocal had averaged those of"
            )
            assert "take warmup=0" in said


def scaled(worker: Worker, which: int, order: Sequence[int]) -> tuple[torch.Tensor, int, list[int]]:
    """Gradients of one optimizer overflow on rank 1 in steps 1 and 2: only there its steps are skipped."""
    model = mlp()
    optimizers = muon_and_adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    session = thinwire.attach(model, "localsgd(every=4)", optimizer=optimizers, scaler=scaler)
    taken = [0, 0]
    for optimizer, position in zip(optimizers, (0, 1), strict=True):
        optimizer.register_step_post_hook(
            lambda *_, position=position: taken.__setitem__(position, taken[position] + 1)
        )
    for step in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(square_loss(model, worker.rank, step)).backward()
        if worker.rank == 1 and step in (1, 2):
            optimizers[which].param_groups[0]["params"][-1].grad.view(-1)[0] = torch.inf
        for position in order:
            scaler.step(optimizers[position])
        scaler.update()
    steps = session.step
    session.detach()
    assert "step" not in scaler.__dict__
    return flat(model), steps, taken


@pytest.mark.parametrize(("which", "order"), [(0, (0, 1)), (0, (1, 0)), (1, (0, 1)), (1, (1, 0))])
def test_a_step_that_one_rank_skips_of_one_optimizer_counts(which: int, order: Sequence[int]) -> None:
    (first, steps, taken), (second, other_steps, other_taken) = run_local(
        scaled, 2, which, order, timeout=400
    )
    assert torch.equal(first, second)
    assert steps == other_steps == 8
    assert taken == [8, 8]
    assert other_taken == [6 if position == which else 8 for position in (0, 1)]


def out_of_turn(worker: Worker, guilty: Sequence[int]) -> tuple[str, str]:
    """AdamW steps twice before Muon, on these ranks."""
    loaded_together(worker, "dense")
    model = mlp()
    muon, adamw = muon_and_adamw(model)
    session = thinwire.attach(model, "localsgd(every=2)", optimizer=[muon, adamw])
    try:
        for step in range(6):
            square_loss(model, worker.rank, step).backward()
            adamw.step()
            if step == 2 and worker.rank in guilty:
                adamw.step()
            muon.step()
    except (ConfigError, ThinwireError) as error:
        return type(error).__name__, str(error)
    finally:
        session.detach()
    return "", ""


@pytest.mark.parametrize("guilty", [(0, 1), (1,)])
def test_a_step_out_of_turn_is_an_error_on_every_rank_and_nobody_hangs(guilty: Sequence[int]) -> None:
    """Where only one rank's script does it, that rank names it, and the others name the rank."""
    outcomes = start_local(out_of_turn, 2, guilty, timeout=8 * TIMEOUT + GRACE_SECONDS, group_timeout=TIMEOUT)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        kind, text = outcome.value
        if outcome.rank in guilty:
            assert kind == "ConfigError", text
            assert "AdamW (optimizer[1]) steps a second time before Muon (optimizer[0]) has stepped" in text
        else:
            assert kind == "PeerError", text
            assert "rank 1" in text
            assert "sync round after step 4" in text


# -- what is refused ---------------------------------------------------------------------------------------

REFUSED = {
    "one of two": (lambda muon, adamw: adamw, "no optimizer holds '0.weight' and 3 more (given: AdamW)"),
    "twice": (lambda muon, adamw: [muon, muon, adamw], "the same Muon twice"),
    "shared": (
        lambda muon, adamw: [muon, adamw, torch.optim.SGD(adamw.param_groups[0]["params"])],
        "is in AdamW (optimizer[1]) and in SGD (optimizer[2])",
    ),
    "none": (lambda muon, adamw: 7, "not a int"),
}


def refusals(worker: Worker) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for what, (choose, _) in REFUSED.items():
        found[what] = []
        for method, host in (("localsgd", mlp), ("localsgd", wrapped), ("topk", wrapped), ("auto", wrapped)):
            model = host()
            with pytest.raises(ConfigError) as raised:
                thinwire.attach(model, method, optimizer=choose(*muon_and_adamw(model)))
            found[what].append(str(raised.value))
    model = wrapped()
    for label, optimizers in (
        ("adam", muon_and_adamw(model)),
        ("adam of none", []),
    ):
        with pytest.raises(ConfigError) as raised:
            thinwire.attach(model, "adam", optimizer=optimizers)
        found[label] = [str(raised.value)]
    return found


def wrapped() -> nn.Module:
    return wrap(mlp())


def test_what_does_not_fit_together_is_refused_on_every_rank() -> None:
    for found in run_local(refusals, 2, timeout=400):
        for what, (_, message) in REFUSED.items():
            assert all(message in said for said in found[what]), found[what]
        (said,) = found["adam"]
        assert "averages the momentum of torch.optim.AdamW or Adam, not of Muon" in said
        (said,) = found["adam of none"]
        assert "give torch.optim.AdamW as optimizer=" in said


# -- methods that average gradients ------------------------------------------------------------------------

PER_STEP = (
    "dense",
    "qsgd(bits=4)",
    "topk(ratio=0.2)",
    "delayed(method=topk(ratio=0.2))",
    "a2sgd(average_every=3)",
)


def per_step(worker: Worker) -> dict[str, list[torch.Tensor]]:
    """With both optimizers given, in both orders, and with none given."""
    found: dict[str, list[torch.Tensor]] = {}
    for method in PER_STEP:
        found[method] = []
        for order, given in ((ORDERS[0], True), (ORDERS[1], True), (ORDERS[0], False)):
            model = wrapped()
            optimizers = muon_and_adamw(model)
            session = thinwire.attach(model, method, optimizer=optimizers if given else None, dense_below=64)
            train(model, optimizers, worker.rank, range(7), order)
            if session.reconcile_every is not None:
                session.reconcile()
                moments = [
                    kept for each in optimizers for state in each.state.values() for kept in state.values()
                ]
                found[f"{method} moments"] = [flat(m for m in moments if m.dim())]
            found[method].append(flat(model))
            session.detach()
    found["adam"] = []
    for halves in (False, True):
        model = wrapped()
        parameters = list(model.parameters())
        groups = (parameters[::2], parameters[1::2]) if halves else (parameters,)
        optimizers = [torch.optim.AdamW(group, lr=0.01) for group in groups]
        session = thinwire.attach(model, "adam(warmup=3)", optimizer=optimizers, dense_below=64)
        found["adam"].append(train(model, optimizers, worker.rank, range(7), range(len(groups))))
        session.detach()
    return found


def test_methods_that_average_gradients_take_both() -> None:
    """Replicas are equal; `adam` takes two AdamW for a half each as one for all, bit for bit."""
    first, second = run_local(per_step, 2, timeout=400)
    for method, results in first.items():
        for mine, theirs in zip(results, second[method], strict=True):
            assert torch.equal(mine, theirs) or method.endswith("moments"), method
        if not method.startswith("a2sgd"):  # which averages the states of optimizers that it knows
            assert all(torch.equal(each, results[0]) for each in results), method


def pair(model: nn.Module) -> list[torch.optim.Optimizer]:
    """As `muon_and_adamw`: torch's own Muon cannot step shards that do not divide evenly."""
    parameters = list(model.parameters())
    matrices, rest = ([p for p in parameters if (p.dim() == 2) is two] for two in (True, False))
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]


def on_fsdp(worker: Worker) -> dict[str, bool]:
    """2 x 2 ranks: between replicas, and over all ranks of one replica."""
    mesh, found = fsdp.mesh_2x2(), {}
    group = mesh["replicate"].get_group()

    def run(method: str, order: Sequence[int], whole: DeviceMesh, **options: object) -> list[torch.Tensor]:
        model = fsdp.sharded(whole)
        optimizers = pair(model)
        session = thinwire.attach(model, method, optimizer=optimizers, dense_below=0, **options)
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            fsdp.loss_of(model, step).backward()
            for which in order:
                optimizers[which].step()
        session.detach()
        return fsdp.shards(model)

    for method in (
        *("topk(ratio=0.2)", "localsgd(every=2)", "localsgd(every=2, momentum='average')"),
        "postlocal(every=2, warmup=2)",
    ):
        one, other = (run(method, order, mesh["shard"], process_group=group) for order in ORDERS)
        found[method] = fsdp.same(one, other) and fsdp.gathered(one, group)
    one, other = (run("qsgd(bits=8)", order, init_device_mesh("cpu", (4,))) for order in ORDERS)
    found["one replica"] = fsdp.same(one, other)
    for whole, options in ((mesh["shard"], {"process_group": group}), (init_device_mesh("cpu", (4,)), {})):
        model = fsdp.sharded(whole)
        with pytest.raises(
            ConfigError, match=r"no optimizer holds 'stem\.weight' and 4 more \(given: AdamW\)"
        ):
            thinwire.attach(model, "qsgd", optimizer=pair(model)[1], **options)
    return found


def test_sharded_models_take_both() -> None:
    for found in run_local(on_fsdp, 4, timeout=400):
        assert all(found.values()), found


# -- checkpoints -------------------------------------------------------------------------------------------


def checkpointed(worker: Worker, folder: str) -> dict[str, object]:
    """Five steps and five more from a checkpoint, or ten at once, with a Checkpointer and with RankStates."""
    found: dict[str, object] = {}
    for method in ("topk(ratio=0.2)", "a2sgd(average_every=4)", "diloco(every=4)"):
        for keeper in ("checkpointer", "rank states"):
            place, results = Path(folder) / keeper / method, []
            for resumed in (False, True):
                model = wrapped()
                optimizers = muon_and_adamw(model)
                session = thinwire.attach(model, method, optimizer=optimizers, dense_below=64)
                if keeper == "checkpointer":
                    kept = thinwire.Checkpointer(place, session, model, optimizers)
                    if resumed:
                        kept.load_latest()
                    else:
                        train(model, optimizers, worker.rank, range(5))
                        kept.save()
                        kept.wait()
                else:
                    states = RankStates(session, model, optimizers, "sum")
                    framework = place / f"framework-{worker.rank}.pt"
                    if resumed:
                        loaded = torch.load(framework, weights_only=True)
                        model.load_state_dict(loaded["model"])
                        for optimizer, state in zip(optimizers, loaded["optimizers"], strict=True):
                            optimizer.load_state_dict(state)
                        states.read(place)
                    else:
                        train(model, optimizers, worker.rank, range(5))
                        states.write(place)
                        each = [optimizer.state_dict() for optimizer in optimizers]
                        torch.save({"model": model.state_dict(), "optimizers": each}, framework)
                results.append(train(model, optimizers, worker.rank, range(5, 10)))
                session.detach()
            found[f"{keeper}, {method}"] = torch.equal(*results)
    return found


def test_checkpoints_go_on_bit_for_bit(tmp_path: Path) -> None:
    for found in run_local(checkpointed, 2, str(tmp_path), timeout=400):
        assert all(found.values()), found


def other_checkpoints(worker: Worker, folder: str) -> dict[str, list[str]]:
    """What was written with two optimizers is read with one, and with three; and one is left out."""
    found: dict[str, list[str]] = {}
    for method in ("topk(ratio=0.2)", "a2sgd(average_every=4)", "diloco(every=4)"):
        place = Path(folder) / method
        model = wrapped()
        optimizers = muon_and_adamw(model)
        session = thinwire.attach(model, method, optimizer=optimizers, dense_below=64)
        kept, states = thinwire.Checkpointer(place, session, model, optimizers), None
        train(model, optimizers, worker.rank, range(5))
        kept.save()
        kept.wait()
        RankStates(session, model, optimizers, "sum").write(place / "ranks")
        with pytest.raises(ConfigError, match="no optimizer holds"):
            thinwire.Checkpointer(place, session, model, optimizers[1])
        session.detach()
        torch.distributed.barrier()
        for number in (1, 3):
            model = wrapped()
            parameters = list(model.parameters())
            others = [torch.optim.AdamW(parameters[n::number], lr=0.01) for n in range(number)]
            session = thinwire.attach(model, method, optimizer=others, dense_below=64)
            before = flat(model)
            states = RankStates(session, model, others, "sum")
            for load in (
                thinwire.Checkpointer(place, session, model, others).load_latest,
                lambda states=states, place=place: states.read(place / "ranks"),
            ):
                try:
                    load()
                except StateError as error:
                    found.setdefault(method, []).append(str(error))
                assert torch.equal(flat(model), before) or method.startswith("topk")
            session.detach()
    return found


def test_a_checkpoint_of_another_number_of_optimizers_is_refused_on_every_rank(tmp_path: Path) -> None:
    for found in run_local(other_checkpoints, 2, str(tmp_path), timeout=400):
        for method, said in found.items():
            # With topk RankStates leaves model and optimizers to the framework, which holds them all.
            assert len(said) == (2 if method.startswith("topk") else 4), (method, said)
            for text in said:
                assert "has the states of 2 optimizers, and this run has" in text, text


# -- auto, and an optimizer that owns a session ------------------------------------------------------------


def automatic(worker: Worker) -> dict[str, object]:
    found: dict[str, object] = {}
    model = wrapped()
    optimizers = muon_and_adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    session = thinwire.attach(model, "auto", optimizer=optimizers, scaler=scaler)
    for step in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(square_loss(model, worker.rank, step)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    found["decided"] = session.decided
    session.reconcile()
    found["model"] = flat(model)
    optimizers[1].step()
    with pytest.raises(ConfigError, match=r"AdamW \(optimizer\[1\]\) steps a second time before Muon"):
        optimizers[1].step()
    session.detach()
    assert "step" not in scaler.__dict__, "the scaler is as before"
    model = wrapped()
    optimizers = muon_and_adamw(model)
    session = thinwire.attach(model, "auto", optimizer=optimizers, replicas="equal")
    for step in range(8):  # gradients are averaged whenever they are computed
        train(model, [optimizers[1]], worker.rank, range(step, step + 1), [0])
    found["equal"] = flat(model)
    session.detach()
    return found


def test_auto_takes_both_and_leaves_nothing_behind() -> None:
    first, second = run_local(automatic, 2, timeout=400)
    assert first["decided"]
    assert second["decided"]
    assert torch.equal(first["model"], second["model"])
    assert torch.equal(first["equal"], second["equal"])


def beside_muon(worker: Worker, folder: str) -> list[torch.Tensor]:
    """CompressedAdamW averages its own parameters; those of Muon have a session of their own."""
    found = []
    for resumed in (False, True):
        model = mlp()
        matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
        muon = torch.optim.Muon(matrices.values(), lr=0.01)
        rest = [(name, p) for name, p in model.named_parameters() if name not in matrices]
        adamw = CompressedAdamW(rest, lr=0.01, warmup=3, dense_below=8)
        session = thinwire.Session(matrices.items(), "topk(ratio=0.2)", optimizer=muon)
        keepers = [
            thinwire.Checkpointer(f"{folder}/{number}", each, model, [muon, adamw])
            for number, each in enumerate((session, adamw.session))
        ]
        if resumed:
            for keeper in keepers:
                keeper.load_latest()
        for step in range(5 if resumed else 0, 10):
            for optimizer in (muon, adamw):
                optimizer.zero_grad()
            model(batch(worker.rank, step)).square().mean().backward()
            session.average({name: p.grad for name, p in matrices.items()}, in_place=True)
            muon.step()
            adamw.step()
            if step == 4:
                for keeper in keepers:
                    keeper.save()
                    keeper.wait()
        found.append(flat(model))
        session.detach()
        adamw.session.detach()
    return found


def test_an_optimizer_that_owns_a_session_beside_muon(tmp_path: Path) -> None:
    (straight, resumed), others = run_local(beside_muon, 2, str(tmp_path), timeout=400)
    assert torch.equal(straight, resumed)
    assert all(torch.equal(each, straight) for each in others)
