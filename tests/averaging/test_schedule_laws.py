"""Laws that every registered schedule keeps, in lock-step."""

import io
import json

import pytest
import torch

import thinwire
import thinwire.averaging
from tests.averaging.cohort import CONFIGURATIONS, Cohort, adam, equal, equal_parameters, normed, wide
from tests.hosts.common import batch, flat, mlp
from tests.laws.cohort import LINKS, every, same_state
from thinwire import Session, list_methods, list_schedules, parse
from thinwire.averaging import Schedule
from thinwire.methods.registry import to_json
from thinwire.net.link import slowest_link
from thinwire.net.rank_info import RankInfo
from thinwire.sessions.checkpoint import dealt

EXACT = ("localsgd(every=1)", "periodic(every=1, exchange=dense)", "spasgd(groups=1)")


@pytest.mark.parametrize(
    ("sizes", "how"), [((2, 3), "sum"), ((4, 2), "drop"), ((2, 4), "drop"), ((3, 2), "sum")]
)
@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_another_number_of_ranks(method: str, sizes: tuple[int, int], how: str) -> None:
    """Equal after the next sync rounds, and trained as well as without the resize."""
    old, new = sizes
    before, after, control = Cohort(method, old), Cohort(method, new), Cohort(method, new)
    for cohort in (before, control):
        cohort.train(range(9))
        cohort.sync()
    states = [session.sealed() for session in before.sessions]
    for session in after.sessions:
        olds = dealt(session.engine, old)
        given = [states[rank] for rank in olds or [0]]
        session.load_state_dict(given, on_resize=how if olds else "drop")
    assert equal_parameters(after.models[0], before.models[0])
    for cohort in (after, control):
        assert all(equal_parameters(model, cohort.models[0]) for model in cohort.models)
        cohort.train(range(9, 29))
        cohort.sync()
        assert all(equal_parameters(model, cohort.models[0]) for model in cohort.models)
    assert loss(after) < 1.2 * loss(control)


def loss(cohort: Cohort) -> float:
    with torch.no_grad():
        return sum(float(cohort.models[0](batch(rank, 99)).square().mean()) for rank in range(3))


@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_replicas_are_equal_after_a_sync(method: str) -> None:
    """Parameters and averaged buffers, after a forced sync, and wherever all fragments met at once."""
    cohort = Cohort(method, 3, make=normed)
    met = 0
    for step in range(13):
        cohort.train([step])
        first = cohort.sessions[0]
        if first.clock.all_synced:
            met += 1
            assert all(equal(model, cohort.models[0]) for model in cohort.models[1:])
        elif first.method.fragment_count == 1:
            assert not equal_parameters(cohort.models[0], cohort.models[1]), "they trained on equal batches?"
    schedule = parse(method)
    if schedule.fragment_count == 1 and schedule.period <= 13:
        assert met
    cohort.sync()
    assert all(equal(model, cohort.models[0]) for model in cohort.models[1:])
    assert all(torch.isfinite(tensor).all() for tensor in cohort.models[0].parameters())


@pytest.mark.parametrize("method", [m for m in CONFIGURATIONS if parse(m).delay])
def test_a_late_result_is_applied_in_time_to_the_same_anchors(method: str) -> None:
    """Each rank keeps what its own steps have changed meanwhile: replicas differ, their anchors do not."""
    cohort = Cohort(method, 3)
    session = cohort.sessions[0]
    seen = 0
    for step in range(24):
        now = [sync_round for sync_round, _ in session.under_way if sync_round.due == step + 1]
        cohort.train([step])
        assert all(sync_round.step <= session.step < sync_round.due for sync_round, _ in session.under_way)
        for number in [number for sync_round in now for number in sync_round.numbers]:
            for other in cohort.sessions[1:]:
                pairs = zip(session.fragments[number].blocks, other.fragments[number].blocks, strict=True)
                assert not any(torch.equal(mine.read(), theirs.read()) for mine, theirs in pairs)
                seen += 1
        for mine, theirs in zip(session.blocks, cohort.sessions[1].blocks, strict=True):
            assert torch.equal(mine.anchor, theirs.anchor)
    assert seen


def dense_trajectory(size: int, steps: int, optimizer) -> torch.Tensor:
    """What plain data-parallel training does: the mean of the gradients in every step."""
    model = mlp()
    stepped = optimizer(model)
    for step in range(steps):
        stepped.zero_grad()
        for rank in range(size):
            (model(batch(rank, step)).square().mean() / size).backward()
        stepped.step()
    return flat(model)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("method", EXACT)
def test_every_step_with_an_exact_exchange_is_data_parallel_sgd(method: str, size: int) -> None:
    """Within 2e-6 of the largest weight after 20 steps of SGD in float32; with momentum, if it is kept: the
    mean of the ranks' momenta is the momentum of the mean."""
    for optimizer in (lambda m: torch.optim.SGD(m.parameters(), lr=0.2), None):
        chosen = optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5))
        cohort = Cohort(method, size, optimizer=chosen)
        cohort.train(range(20))
        expected = dense_trajectory(size, 20, chosen)
        difference = float((flat(cohort.models[0]) - expected).abs().max() / expected.abs().max())
        assert difference < 2e-6


@pytest.mark.parametrize(
    "method", ["localsgd(every=5)", "spasgd(groups=4)", "spasgd(groups=4, order='shuffled')"]
)
def test_the_mean_of_the_replicas_moves_as_the_gradients_say(method: str) -> None:
    """An exact average changes no mean: x' = x - lr mean(g), whatever has been averaged."""
    cohort = Cohort(method, 3, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.2))
    for step in range(10):
        before = torch.stack([flat(model) for model in cohort.models]).mean(0)
        cohort.train([step])
        grads = [flat(p.grad for p in model.parameters()) for model in cohort.models]
        after = torch.stack([flat(model) for model in cohort.models]).mean(0)
        expected = before - 0.2 * torch.stack(grads).mean(0)
        torch.testing.assert_close(after, expected, rtol=0, atol=3e-7)


# Signs in two shots or in a gather, of each fragment.
PROMISED = (
    *CONFIGURATIONS,
    "postlocal(every=2, warmup=0)",
    "postlocal(every=4, bits=2, warmup=0, fragments=2)",
)


@every([m for m in PROMISED if parse(m).warmup == 0], quick=(), link=LINKS)
def test_metered_bytes_are_what_was_promised(method: str, link: str) -> None:
    """On the last of five ranks: with two levels, of two ranks each, it leads its host.

    Nothing is promised only where the data decide how long the pieces of a split are.
    """
    schedule, cohort = parse(method), Cohort(method, 5, make=wide, link=slowest_link(link))
    session, meter = cohort.sessions[4], cohort.driver.meters[4]
    if session.cycle_bytes() is None:
        assert schedule.inner.traits.payload == "data-dependent", "other schedules know their bytes"
        cohort.train(range(schedule.period))
        assert "all_to_all" in meter.by_operation
        return
    if schedule.period > 20:
        cohort.train(range(2))
        before = meter.payload_bytes
        cohort.sync()
        assert meter.payload_bytes - before == session.cycle_bytes()
        return
    cohort.train(range(schedule.period))
    before = meter.payload_bytes
    cohort.train(range(2 * schedule.period))
    metered = meter.payload_bytes - before
    assert metered == 2 * session.cycle_bytes()
    assert session.payload_bytes() == metered / (2 * schedule.period)


def test_promised_bytes_are_few() -> None:
    cohort = Cohort("pqasgd(every=8, bits=4)", 2)
    assert cohort.sessions[0].payload_bytes() < 0.025 * cohort.sessions[0].dense_bytes
    cohort = Cohort("spasgd(groups=8)", 2)
    assert cohort.sessions[0].payload_bytes() < 0.14 * cohort.sessions[0].dense_bytes


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("optimizer", [None, adam], ids=["momentum", "adamw"])
@pytest.mark.parametrize("method", CONFIGURATIONS)
@pytest.mark.parametrize("stop", [7, 8])
def test_a_checkpoint_goes_on_bit_for_bit(method: str, stop: int, optimizer) -> None:
    """Also between two sync rounds, and with a result under way; the session's state is all that is saved."""
    options = {"make": normed} | ({"optimizer": optimizer} if optimizer else {})
    straight, before, after = (Cohort(method, 2, **options) for _ in range(3))
    straight.train(range(20))
    before.train(range(stop))
    for old, new in zip(before.sessions, after.sessions, strict=True):
        new.load_state_dict(through_a_file(old.state_dict()))
    after.train(range(stop, 20))
    for rank in range(2):
        assert equal(straight.models[rank], after.models[rank])
        assert same_state(straight.sessions[rank].sealed(), after.sessions[rank].sealed())


def test_saving_disturbs_nothing_and_shares_no_memory() -> None:
    for method in CONFIGURATIONS:
        quiet, disturbed = Cohort(method, 2), Cohort(method, 2)
        for step in range(6):
            quiet.train([step])
            disturbed.train([step])
            for session in disturbed.sessions:
                for anchor in session.sealed()["anchors"].values():
                    anchor.fill_(7.0)
        assert equal(quiet.models[0], disturbed.models[0]), method


def test_every_schedule_is_registered_exported_and_documented() -> None:
    def leaves(cls: type) -> set[type]:
        children = cls.__subclasses__()
        return set().union(*map(leaves, children)) if children else {cls}

    own = {cls for cls in leaves(Schedule) if cls.__module__.startswith("thinwire.")}
    assert own == set(list_schedules().values())
    assert not set(list_schedules()) & set(list_methods())
    for name, cls in list_schedules().items():
        assert cls().name == name
        assert getattr(thinwire.averaging, cls.__name__) is cls
        assert "Example:" in (cls.__doc__ or "")


# Several fragments with results that come later: what is not finite must not wander from one to the other.
WANDERING = (
    "postlocal(every=4, warmup=0, fragments=4)",
    "postlocal(every=4, warmup=0, fragments=2, overlap=3)",
    "pqasgd(every=6, fragments=2)",
    "diloco(every=8, fragments=4, overlap=5)",
    "periodic(every=6, exchange=topk(ratio=0.2), fragments=3, overlap=4)",
)


@pytest.mark.parametrize("optimizer", [None, adam], ids=["momentum", "adamw"])
@pytest.mark.parametrize(
    "method", dict.fromkeys([m for m in CONFIGURATIONS if parse(m).period <= 20] + list(WANDERING))
)
def test_a_gradient_that_is_not_finite_costs_the_sync_rounds_that_saw_it(method: str, optimizer) -> None:
    """Those that begin until the first of them is aborted. Then training goes on, on finite replicas."""
    cohort = Cohort(method, 2, **({"optimizer": optimizer} if optimizer else {}))
    session, bad = cohort.sessions[0], 13
    cohort.train(range(bad))
    before = session.aborted
    cohort.train([bad], poisoned=1)
    apart, delay = -(-session.clock.steps // session.method.fragment_count), session.method.delay
    seen_until = bad + 1 + apart + delay  # the first is aborted by then; others that saw it have begun
    cohort.train(range(bad + 1, seen_until + delay))
    cost = session.aborted - before
    assert 1 <= cost <= 1 + -(-delay // apart)
    cohort.train(range(seen_until + delay, 60))
    assert session.aborted - before == cost
    assert all(bool(flat(model).isfinite().all()) for model in cohort.models)
    for one in cohort.optimizers:
        kept = [value for state in one.state.values() for value in state.values()]
        assert all(bool(value.isfinite().all()) for value in kept)
    cohort.sync()
    assert equal(cohort.models[0], cohort.models[1])


@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_configurations_survive_a_round_trip(method: str) -> None:
    schedule = parse(method)
    assert parse(str(schedule)) == schedule
    assert parse(repr(schedule)) == schedule
    assert parse(to_json(schedule)) == schedule
    assert parse(json.loads(to_json(schedule))) == schedule
    assert hash(schedule) == hash(parse(str(schedule)))


@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_training_gets_somewhere(method: str) -> None:
    """On its task (outputs to zero), the loss of the common model falls by half in 40 steps."""
    cohort = Cohort(method, 4, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.2))
    test = torch.cat([batch(rank, 999) for rank in range(4)])
    first = float(cohort.models[0](test).detach().square().mean())
    cohort.train(range(40))
    cohort.sync()
    assert float(cohort.models[0](test).detach().square().mean()) < 0.5 * first


@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_nothing_depends_on_or_touches_the_global_generator(method: str) -> None:
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        cohort = Cohort(method, 2)
        cohort.train(range(6))
        assert torch.equal(before, torch.get_rng_state())
        results.append(flat(cohort.models[0]))
    assert torch.equal(*results)


@pytest.mark.parametrize("method", CONFIGURATIONS)
def test_a_world_of_one(method: str) -> None:
    cohort = Cohort(method, 1)
    cohort.train(range(10))
    cohort.sync()
    assert torch.isfinite(flat(cohort.models[0])).all()


def test_one_rank_with_local_sgd_trains_as_if_alone() -> None:
    cohort = Cohort("localsgd(every=3)", 1)
    cohort.train(range(9))
    alone = dense_trajectory(1, 9, lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.5))
    torch.testing.assert_close(flat(cohort.models[0]), alone, rtol=0, atol=1e-6)


def test_an_exchange_inside_sees_what_it_would_see_alone() -> None:
    """The mean that `periodic` applies is that of a session over `anchor - params`, residuals included."""
    cohort = Cohort("periodic(every=2, exchange=topk(ratio=0.2))", 2)
    alone = [
        Session(mlp().named_parameters(), "topk(ratio=0.2)", rank_info=RankInfo(rank, 2), dense_below=64)
        for rank in range(2)
    ]
    for sync_round in range(3):
        anchors = dict(cohort.sessions[0].common_parameters())
        anchors = {name: anchor.clone() for name, anchor in anchors.items()}
        for step in (2 * sync_round, 2 * sync_round + 1):
            for rank in range(2):
                cohort.local_step(rank, step)
            if step % 2:
                changes = [
                    {name: anchors[name] - p.detach() for name, p in model.named_parameters()}
                    for model in cohort.models
                ]
            cohort.advance()
        pairs = [session.engine.views(change) for session, change in zip(alone, changes, strict=True)]
        for session in alone:
            session.engine.step = sync_round
        kept = cohort.driver.run(
            [s.engine.program(views) for s, (_, views) in zip(alone, pairs, strict=True)]
        )
        assert kept
        for name, p in cohort.models[0].named_parameters():
            torch.testing.assert_close(p.detach(), anchors[name] - pairs[0][0][name], rtol=0, atol=1e-7)
