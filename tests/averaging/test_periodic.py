"""What single options do: when the replicas synchronise, momentum, buffers, anchors, failures of numbers."""

import copy
import itertools

import pytest
import torch
from torch import nn

import thinwire
from tests.averaging.cohort import Cohort, adam, equal_parameters, normed, sgd
from tests.hosts.common import batch, flat
from thinwire import ConfigError, StateError, parse
from thinwire.averaging import LocalSGD
from thinwire.averaging.clock import Clock
from thinwire.averaging.fragments import cut
from thinwire.averaging.sync_round import NOTE_BYTES
from thinwire.core import schema
from thinwire.methods.registry import parse_exchange
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.periodic import PeriodicSession


def rounds_of(method: str, steps: int) -> list[tuple[int, list[int]]]:
    clock = Clock(parse(method), seed=0)
    found = []
    for _ in range(steps):
        due, _, _ = clock.tick()
        if due:
            found.append((clock.step, due))
    return found


def test_when_replicas_synchronise() -> None:
    assert rounds_of("localsgd(every=4)", 12) == [(4, [0]), (8, [0]), (12, [0])]
    assert [at for at, _ in rounds_of("localsgd(every=4, warmup=3)", 12)] == [1, 2, 3, 7, 11]
    assert rounds_of("diloco(every=6, fragments=3)", 12) == [(s, [(s // 2 - 1) % 3]) for s in range(2, 13, 2)]
    assert rounds_of("localsgd(every=5, fragments=2)", 10) == [(3, [0]), (5, [1]), (8, [0]), (10, [1])]
    assert rounds_of("localsgd(every=4, fragments=2, warmup=1)", 5) == [(1, [0, 1]), (3, [0]), (5, [1])]
    assert [due for _, due in rounds_of("spasgd(groups=3)", 4)] == [[0], [1], [2], [0]]


def test_shuffled_groups_all_have_their_turn_in_every_round() -> None:
    rounds = rounds_of("spasgd(groups=6, order='shuffled')", 18)
    orders = [[due[0] for _, due in rounds[i : i + 6]] for i in (0, 6, 12)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert orders[0] != orders[1] or orders[1] != orders[2]
    staleness = [i for i, (_, due) in enumerate(rounds) if due == [2]]
    assert all(b - a <= 2 * 6 - 1 for a, b in itertools.pairwise(staleness))


def test_spa_without_gradients_reaches_consensus_in_one_round() -> None:
    cohort = Cohort("spasgd(groups=4)", 3)
    with torch.no_grad():
        for rank, model in enumerate(cohort.models):
            for p in model.parameters():
                p.add_(0.1 * rank)
    mean = torch.stack([flat(model) for model in cohort.models]).mean(0)
    for _ in range(4):
        assert not equal_parameters(cohort.models[0], cohort.models[1])
        cohort.advance()
    assert all(equal_parameters(cohort.models[0], model) for model in cohort.models)
    torch.testing.assert_close(flat(cohort.models[0]), mean, rtol=0, atol=3e-7)


def test_groups_are_of_equal_size_and_cover_everything() -> None:
    model = nn.Sequential(nn.Linear(30, 7), nn.Linear(7, 5), nn.BatchNorm1d(5))
    fragments = cut(
        dict(model.named_parameters()), 4, whole_tensors=False, anchor_device=None, velocity=False
    )
    sizes = [sum(block.layout.numel for block in fragment.blocks) for fragment in fragments]
    total = sum(p.numel() for p in model.parameters())
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    covered = torch.cat(
        [torch.arange(p.start, p.stop) for f in fragments for p in f.pieces if p.name == "0.weight"]
    )
    assert torch.equal(covered, torch.arange(210))


def test_fragments_are_runs_of_whole_tensors() -> None:
    parameters = {str(i): torch.zeros(n) for i, n in enumerate((100, 1, 1, 50, 50, 100))}
    fragments = cut(parameters, 3, whole_tensors=True, anchor_device=None, velocity=False)
    assert [[p.name for p in fragment.pieces] for fragment in fragments] == [
        ["0", "1"],
        ["2", "3", "4"],
        ["5"],
    ]
    each = cut(parameters, 6, whole_tensors=True, anchor_device=None, velocity=False)
    assert [len(fragment.pieces) for fragment in each] == [1] * 6
    with pytest.raises(ConfigError, match="fragments=7, but the model has only 6 tensors"):
        cut(parameters, 7, whole_tensors=True, anchor_device=None, velocity=False)


def momenta(cohort: Cohort) -> list[torch.Tensor]:
    return [
        torch.cat([optimizer.state[p]["momentum_buffer"].flatten() for p in model.parameters()])
        for model, optimizer in zip(cohort.models, cohort.optimizers, strict=True)
    ]


def test_momentum_in_a_sync_round() -> None:
    kept, averaged, reset = (
        Cohort(f"localsgd(every=3, momentum={m!r})", 2) for m in ("keep", "average", "reset")
    )
    for cohort in (kept, averaged, reset):
        cohort.train(range(3))
    own = momenta(kept)
    assert not torch.equal(*own)
    same = momenta(averaged)
    assert torch.equal(*same)
    torch.testing.assert_close(same[0], (own[0] + own[1]) / 2, rtol=0, atol=1e-7)
    assert not reset.optimizers[0].state
    for cohort in (averaged, reset):
        cohort.train(range(3, 7))


def test_averaged_moments_of_adam_leave_the_count_alone() -> None:
    cohort = Cohort("localsgd(every=2, momentum='average')", 2, optimizer=adam)
    cohort.train(range(4))
    for optimizer, model in zip(cohort.optimizers, cohort.models, strict=True):
        assert all(float(optimizer.state[p]["step"]) == 4 for p in model.parameters())
    first, second = (optimizer.state for optimizer in cohort.optimizers)
    for a, b in zip(cohort.models[0].parameters(), cohort.models[1].parameters(), strict=True):
        assert torch.equal(first[a]["exp_avg_sq"], second[b]["exp_avg_sq"])


def optimizer_state(cohort: Cohort) -> list[dict[str, torch.Tensor]]:
    """Of every rank: the tensors of its optimizer, flat and by name; the count of steps among them."""
    found = []
    for model, optimizer in zip(cohort.models, cohort.optimizers, strict=True):
        states = [optimizer.state[p] for p in model.parameters()]
        found.append({name: torch.cat([s[name].flatten() for s in states]) for name in states[0]})
    return found


def before_and_after_a_sync_round(method: str, optimizer) -> tuple[Cohort, list[dict], list[dict]]:
    """The optimizers' states right before the first sync round and right after it."""
    cohort = Cohort(method, 3, make=small_cnn, optimizer=optimizer)
    for step in range(100):
        for rank in range(3):
            cohort.local_step(rank, step)
        before = optimizer_state(cohort)
        cohort.advance()
        if cohort.sessions[0].sync_rounds:
            return cohort, before, optimizer_state(cohort)
    raise AssertionError("no sync round")


def small_cnn() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        image = nn.Unflatten(1, (1, 5, 8))
        return nn.Sequential(image, nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5))


PAPER = ("pqasgd(every=3, bits=8{})", "spasgd(groups=3{})", "periodic(every=1, exchange=qsgd(bits=8){})")


@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["momentum", "adamw"])
@pytest.mark.parametrize("method", PAPER)
def test_the_optimizers_state_stays_with_each_rank_by_default(method: str, optimizer) -> None:
    """Bit for bit, while the parameters become equal."""
    cohort, before, after = before_and_after_a_sync_round(method.format(""), optimizer)
    for mine, now in zip(before, after, strict=True):
        assert all(torch.equal(mine[name], now[name]) for name in mine)
    moments = [name for name in after[0] if name != "step"]
    assert all(not torch.equal(after[0][name], after[1][name]) for name in moments)
    cohort.sync()
    assert equal_parameters(cohort.models[0], cohort.models[1])


@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["momentum", "adamw"])
@pytest.mark.parametrize("method", PAPER)
def test_an_averaged_state_is_the_exact_mean_where_parameters_are_averaged(method: str, optimizer) -> None:
    """Momenta and second moments; not quantised, and not the count of steps."""
    cohort, before, after = before_and_after_a_sync_round(method.format(", momentum='average'"), optimizer)
    n = len(flat(cohort.models[0]))
    met = torch.zeros(n, dtype=torch.bool)
    groups = 3 if method.startswith("spasgd") else 1
    met[: sum(block.layout.numel for block in cohort.sessions[0].fragments[0].blocks)] = True
    assert int(met.sum()) == pytest.approx(n / groups, abs=1)
    for name in [name for name in before[0] if name != "step"]:
        mean = torch.stack([mine[name] for mine in before]).mean(0)
        for mine, now in zip(before, after, strict=True):
            torch.testing.assert_close(now[name][met], mean[met], rtol=1e-5, atol=1e-8)
            assert torch.equal(now[name][~met], mine[name][~met])
    for mine, now in zip(before, after, strict=True):
        assert "step" not in mine or torch.equal(mine["step"], now["step"])


def test_buffers_are_averaged_unless_they_are_not_to_be() -> None:
    cohort = Cohort("localsgd(every=2)", 2, make=normed)
    apart = Cohort("localsgd(every=2, buffers=False)", 2, make=normed)
    for each in (cohort, apart):
        each.train(range(2))
    own = [model.norm.running_mean for model in apart.models]
    assert not torch.equal(*own)
    torch.testing.assert_close(cohort.models[0].norm.running_mean, (own[0] + own[1]) / 2, rtol=0, atol=1e-7)
    assert torch.equal(cohort.models[0].norm.running_mean, cohort.models[1].norm.running_mean)
    assert int(cohort.models[0].norm.num_batches_tracked) == 2


def test_an_anchor_in_main_memory_is_single_precision_and_changes_nothing() -> None:
    near, far = Cohort("diloco(every=2)", 2), Cohort("diloco(every=2, anchor='cpu')", 2)
    for cohort in (near, far):
        cohort.train(range(6))
    assert equal_parameters(near.models[0], far.models[0])
    assert all(block.anchor.device.type == "cpu" for block in far.sessions[0].blocks)
    narrow = Cohort("diloco(every=2, anchor='cpu')", 2, make=lambda: normed().body.to(torch.bfloat16))
    assert all(block.anchor.dtype == torch.float32 for block in narrow.sessions[0].blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    for method in (
        "localsgd(every=2)",
        "pqasgd(every=2)",
        "spasgd(groups=2)",
        "diloco(every=2, fragments=2)",
    ):
        cohort = Cohort(method, 2, make=lambda: normed().body.to(dtype))
        for step in range(4):
            for rank in range(2):
                cohort.optimizers[rank].zero_grad()
                cohort.models[rank](batch(rank, step, dtype)).float().square().mean().backward()
                cohort.optimizers[rank].step()
            cohort.advance()
        cohort.sync()
        assert equal_parameters(*cohort.models)
        assert next(cohort.models[0].parameters()).dtype == dtype


def test_diloco_takes_nesterovs_step() -> None:
    """Against torch's own SGD(nesterov=True) on the mean of `anchor - params`."""
    cohort = Cohort("diloco(every=2, outer_lr=0.7, outer_momentum=0.9)", 2)
    outer = [p.detach().clone().requires_grad_() for p in cohort.models[0].parameters()]
    optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    for sync_round in range(3):
        for step in (2 * sync_round, 2 * sync_round + 1):
            for rank in range(2):
                cohort.local_step(rank, step)
            if step % 2:
                for index, anchor in enumerate(outer):
                    own = [list(model.parameters())[index].detach() for model in cohort.models]
                    anchor.grad = anchor.detach() - (own[0] + own[1]) / 2
                optimizer.step()
            cohort.advance()
        for anchor, p in zip(outer, cohort.models[0].parameters(), strict=True):
            torch.testing.assert_close(p.detach(), anchor.detach(), rtol=0, atol=1e-6)


def test_the_warm_up_takes_the_plain_mean() -> None:
    """Nesterov's momentum in every single step would be a far larger step than the optimizer's."""
    outer, plain = Cohort("diloco(every=2, warmup=3)", 2), Cohort("localsgd(every=2, warmup=3)", 2)
    outer.train(range(3))
    plain.train(range(3))
    assert torch.equal(flat(outer.models[0]), flat(plain.models[0]))
    assert all(float(block.velocity.abs().max()) == 0 for block in outer.sessions[0].blocks)
    outer.train(range(3, 5))
    plain.train(range(3, 5))
    assert not torch.allclose(flat(outer.models[0]), flat(plain.models[0]))


@pytest.mark.parametrize("outer", ["", ", outer_lr=0.7, outer_momentum=0.9"])
def test_local_steps_during_the_overlap_are_kept(outer: str) -> None:
    """The parameters move by as much as they would have moved when the sync round began."""
    late = Cohort(f"periodic(every=4, exchange=dense, overlap=2{outer})", 2)
    at_once = Cohort(f"periodic(every=4, exchange=dense{outer})", 2)
    late.train(range(3))
    at_once.train(range(3))
    for rank in range(2):
        late.local_step(rank, 3)
    begun = [flat(model) for model in late.models]
    late.advance()
    at_once.train([3])  # the same sync round, applied at once
    late.train([4])
    for rank in range(2):
        late.local_step(rank, 5)
    own = [flat(model) for model in late.models]
    late.advance()
    for model, before, then in zip(late.models, own, begun, strict=True):
        progress = before - then
        assert progress.abs().max() > 0
        torch.testing.assert_close(flat(model), flat(at_once.models[0]) + progress, rtol=0, atol=1e-6)


def test_numbers_that_are_not_finite_are_dropped_by_all_and_training_goes_on(caplog) -> None:
    for method in ("localsgd(every=2)", "pqasgd(every=2)", "periodic(every=2, exchange=topk(ratio=0.2))"):
        cohort = Cohort(method, 3)
        cohort.train(range(4))
        common, residuals = flat(cohort.models[0]), cohort.sessions[0].residuals()
        residuals = {name: owed.clone() for name, owed in residuals.items()}
        for rank in range(3):
            cohort.local_step(rank, 4)
        with torch.no_grad():
            next(cohort.models[1].parameters()).view(-1)[3] = torch.nan
            cohort.optimizers[1].state[next(cohort.models[1].parameters())]["momentum_buffer"][0, 0] = (
                torch.inf
            )
        cohort.advance()
        for rank in range(3):
            cohort.local_step(rank, 5)
        cohort.advance()
        for rank, model in enumerate(cohort.models):
            assert torch.equal(flat(model), common), f"{method}: rank {rank}"
            assert cohort.sessions[rank].aborted == 1
        for name, owed in cohort.sessions[0].residuals().items():
            assert torch.equal(owed, residuals[name])
        cohort.train(range(6, 10))
        assert all(torch.isfinite(flat(model)).all() for model in cohort.models)
        assert equal_parameters(cohort.models[0], cohort.models[1])
        assert "the sync round after step 6 is aborted" in caplog.text


def test_sync_between_sync_rounds_starts_a_new_cycle_and_is_idle_where_all_are_equal() -> None:
    cohort = Cohort("diloco(every=4)", 2)
    cohort.train(range(6))
    cohort.sync()
    assert equal_parameters(*cohort.models)
    before, payload = flat(cohort.models[0]), cohort.driver.meters[0].payload_bytes
    cohort.sync()
    assert torch.equal(flat(cohort.models[0]), before), "an outer step without any local one"
    assert cohort.driver.meters[0].payload_bytes - payload == NOTE_BYTES
    cohort.train(range(6, 9))
    assert not equal_parameters(*cohort.models)
    cohort.train([9])
    assert equal_parameters(*cohort.models)


def test_the_common_model_can_be_looked_at_between_sync_rounds() -> None:
    cohort = Cohort("localsgd(every=4)", 2)
    cohort.train(range(4))
    common = flat(cohort.models[0])
    cohort.train(range(4, 6))
    own = flat(cohort.models[1])
    with cohort.sessions[1].common_model():
        assert torch.equal(flat(cohort.models[1]), common)
    assert torch.equal(flat(cohort.models[1]), own)


def test_ranks_that_come_after_different_steps_are_told_so() -> None:
    cohort = Cohort("localsgd(every=4)", 2)
    cohort.train(range(2))
    cohort.sessions[1].advance()
    with pytest.raises(
        thinwire.DisagreementError, match=r"different numbers of optimizer steps \(rank 0: 2, rank 1: 3"
    ):
        cohort.sync()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("localsgd(every=0)", "every must be a whole number from 1 up"),
        ("localsgd(evry=2)", r"no option 'evry' \(did you mean 'every'"),
        ("localsgd(grow=2.0)", "no option 'grow'; valid options: every, .*overlap, "),
        ("localsgd(longest=20)", "no option 'longest' .*; valid options: every, .*overlap, "),
        ("localsgd(every=2, fragments=3)", "3 fragments cannot be synchronised one by one"),
        ("localsgd(every=4, overlap=4)", "overlap=4 must be less than every=4"),
        ("localsgd(overlap='auto')", "overlap must be a whole number from 0 up, not 'auto'"),
        ("localsgd(overlap=1, blend=0.5)", "no option 'blend'; valid options: every, .*overlap, "),
        ("localsgd(deadline=0)", "deadline must be a finite number above 0"),
        ("localsgd(deadline='soon')", "deadline must be a finite number above 0"),
        ("spasgd(deadline=1)", "no option 'deadline'"),
        ("localsgd(overlap=1, momentum='average')", "momentum='average' needs overlap=0"),
        ("localsgd(momentum='drop')", "momentum must be one of 'keep', 'reset', 'average'"),
        ("localsgd(anchor='gpu')", "anchor must be one of 'device', 'cpu'"),
        ("localsgd(buffers=1)", "buffers must be True or False"),
        ("spasgd(groups=0)", "groups must be a whole number from 1 up"),
        ("spasgd(order='random')", "order must be one of 'cyclic', 'shuffled'"),
        ("spasgd(momentum='reset')", "cannot be reset for a part of a tensor"),
        ("pqasgd(bits=3)", "bits must be one of 1, 2, 4, 8"),
        ("diloco(outer_lr=0)", "outer_lr must be a finite number above 0"),
        ("diloco(outer_momentum=1)", "outer_momentum must be a number from 0 up and below 1"),
        ("periodic(exchange=dgc)", "dgc keeps a momentum of gradients"),
        ("periodic(exchange=a2sgd)", "gives every rank a result of its own"),
        ("periodic(exchange=tpok)", "unknown method 'tpok'"),
        ("periodic(exchange=localsgd)", "exchange must be a method that averages tensors"),
        ("periodic(exchange=3)", "exchange must be a method that averages tensors, such as .* not 3"),
    ],
)
def test_bad_options_get_helpful_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_a_fixed_group_cannot_go_on_without_a_late_rank() -> None:
    with pytest.raises(ConfigError, match="a fixed process group waits"):
        Cohort("localsgd(every=4, deadline=2.0)", 2)


def test_a_schedule_is_not_an_exchange() -> None:
    for entry in (parse_exchange, lambda method: thinwire.Session([("w", torch.zeros(3))], method)):
        with pytest.raises(ConfigError, match="pqasgd averages parameters periodically"):
            entry("pqasgd")


def test_models_that_cannot_be_averaged_are_refused() -> None:
    model, other = normed(), nn.Linear(3, 3)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="2 tensors in SGD are not the model's"):
        PeriodicSession(model, LocalSGD(), both, rank_info=RankInfo(0, 1))
    strange = torch.optim.SGD(other.parameters(), lr=0.1)
    for p in other.parameters():
        p.requires_grad_(False)
    with pytest.raises(ConfigError, match="none of the model's parameters is in SGD"):
        PeriodicSession(model, LocalSGD(), strange, rank_info=RankInfo(0, 1))


# -- checkpoints -------------------------------------------------------------------------------------------


def test_a_bad_checkpoint_is_refused_and_nothing_is_loaded() -> None:
    method = "diloco(every=4, fragments=2, overlap=1)"
    source = Cohort(method, 2, make=normed)
    source.train(range(6))
    good = source.sessions[0].sealed()
    assert good["under_way"], "the test wants a sync round under way"

    def spoil(change) -> dict:
        state = copy.deepcopy(good)
        change(state)
        del state["checksums"]
        return schema.seal(state)

    first = next(iter(good["anchors"]))
    cases = {
        "has no 'clock'": lambda s: s.pop("clock"),
        "format is 9, this version reads": lambda s: s.update(format=9),
        "schedule is": lambda s: s.update(schedule="LocalSGD(every=1)"),
        "another model": lambda s: s["parameters"].pop(),
        "step is -1": lambda s: s["clock"].update(step=-1),
        "begins after its last step": lambda s: s["clock"].update(start=99),
        "sync_rounds is True": lambda s: s.update(sync_rounds=True),
        "anchors lacks": lambda s: s["anchors"].pop(first),
        "anchors of": lambda s: s["anchors"].update({first: torch.zeros(3)}),
        "velocities has .x., which": lambda s: s["velocities"].update(x=torch.zeros(1)),
        "buffers of": lambda s: s["buffers"].update({"norm.running_mean": torch.zeros(2)}),
        "replica of": lambda s: s["replica"].update({first: torch.zeros(3)}),
        "optimizers is not a list": lambda s: s.update(optimizers=3),
        "SGD in the checkpoint's optimizers is not": lambda s: s.update(optimizers=[3]),
        "groups of": lambda s: s["optimizers"][0]["param_groups"][0]["params"].pop(),
        "momentum_buffer": lambda s: s["optimizers"][0]["state"][0].update(momentum_buffer=torch.zeros(1, 2)),
        "for parameter 99": lambda s: s["optimizers"][0]["state"].update({99: {}}),
        "a sync round that does not fit": lambda s: s["under_way"][0].update(fragments=[7]),
        "under_way.0.'s change": lambda s: s["under_way"][0].update(changes=[torch.zeros(2)]),
        "this is rank 0": lambda s: s["engine"].update(rank=1),
    }
    target = Cohort(method, 2, make=normed)
    target.train(range(3))
    before = target.sessions[0].sealed()
    from tests.laws.cohort import same_state

    for message, change in cases.items():
        with pytest.raises(StateError, match=message):
            target.sessions[0].load_state_dict(spoil(change))
        assert same_state(target.sessions[0].sealed(), before), message
    target.sessions[0].load_state_dict(good)
    assert same_state(target.sessions[0].sealed(), good)


def test_another_number_of_ranks() -> None:
    method = "periodic(every=2, exchange=topk(ratio=0.2))"
    two = Cohort(method, 2)
    two.train(range(4))
    states = [session.sealed() for session in two.sessions]
    one = Cohort(method, 1)
    with pytest.raises(StateError, match="on_resize"):
        one.sessions[0].load_state_dict(states[0])
    one.sessions[0].load_state_dict(states, on_resize="sum")
    assert equal_parameters(one.models[0], two.models[0])
    owed = [state["engine"]["state"]["0.weight"]["error"] for state in states]
    taken = one.sessions[0].sealed()["engine"]["state"]["0.weight"]["error"]
    torch.testing.assert_close(taken, (owed[0] + owed[1]) / 2)
    assert float(taken.abs().max()) > 0
    one.train(range(4, 6))
    two.train([4])
    drifted = [session.sealed() for session in two.sessions]
    assert drifted[0]["replica"]
    with pytest.raises(StateError, match=r"Call session\.sync\(\) before it is written"):
        Cohort(method, 1).sessions[0].load_state_dict(drifted, on_resize="sum")
    third = Cohort(method, 1)
    third.sessions[0].load_state_dict(drifted[1], on_resize="drop")
    assert torch.equal(flat(third.models[0]), flat(two.sessions[0].common_parameters().values()))
