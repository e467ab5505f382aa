"""Two levels: exact inside a host, any method between hosts."""

from __future__ import annotations

import os
import time

import pytest
import torch

import thinwire
from tests.averaging.cohort import Cohort as Replicas
from tests.failures.test_peers import BAD_STEP, TIMEOUT, Caught, caught
from tests.hosts.common import flat, mlp, square_loss, train, wrap
from tests.laws.cohort import SHAPES, Cohort, memory, same_bits, same_state, total
from thinwire import ConfigError, DisagreementError, StateError, parse, predict
from thinwire.drivers import Simulated
from thinwire.net import costs
from thinwire.net.costs import Link
from thinwire.net.launch import Worker, run_local, start_local
from thinwire.net.rank_info import Hosts, RankInfo

OUTER = ("dense", "topk(ratio=0.1)", "qsgd(bits=4)", "powersgd(rank=2)", "scalecom(ratio=0.1)", "laq(bits=4)")
N = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def by_hand(size: int, local: int, inputs: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The means of the hosts."""
    hosts = [inputs[first : first + local] for first in range(0, size, local)]
    return [
        {
            name: sum(one[name] * (1 / local) for one in host[1:]) + host[0][name] * (1 / local)
            for name in SHAPES
        }
        for host in hosts
    ]


# -- the result ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", OUTER)
def test_it_is_the_outer_method_among_hosts_that_hold_their_means(outer: str) -> None:
    """Bit for bit: the leaders are a group of their own, with its ranks and its random numbers."""
    ranks, hosts = Cohort(f"hierarchical(outer={outer}, local=2)", 6), Cohort(outer, 3)
    for step in range(4):
        inputs = ranks.inputs(step)
        given = by_hand(6, 2, inputs)
        expected, found = hosts.average(given), ranks.average(inputs)
        for name in SHAPES:
            assert all(same_bits(expected[0][name], one[name]) for one in found), (step, name)
    leaders = [session.residuals() for session in ranks.sessions[::2]]
    for one, other in zip(leaders, hosts.sessions, strict=True):
        for name, residual in other.residuals().items():
            assert torch.equal(one[name], 2 * residual), "it stands for the gradients of two ranks"
    assert not any(session.residuals() for session in ranks.sessions[1::2])


@pytest.mark.parametrize(("size", "local"), [(5, 2), (5, 3), (7, 4), (3, 8), (4, 1)])
def test_a_host_with_fewer_ranks_has_their_weight(size: int, local: int) -> None:
    cohort = Cohort(f"hierarchical(outer=dense, local={local})", size)
    inputs = cohort.inputs(0)
    truth = {name: sums / size for name, sums in total(inputs).items()}
    for name, output in cohort.average(inputs)[-1].items():
        assert (output - truth[name]).abs().max() < 1e-5 * (1 + truth[name].abs().max())


def test_hosts_of_a_group_that_is_not_the_world() -> None:
    """Every second of eight ranks, four to a host."""
    found = [Hosts.of(RankInfo(rank, 4), 4, [0, 2, 4, 6]) for rank in range(4)]
    assert [one.members for one in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert {one.leaders for one in found} == {(0, 2)}
    assert [one.leads for one in found] == [True, False, True, False]
    assert found[3].inside == RankInfo(1, 2)
    assert found[3].between == RankInfo(1, 2)


# -- bytes ---------------------------------------------------------------------------------------------------


def test_bytes_inside_and_between_hosts_are_counted_apart() -> None:
    cohort = Cohort("hierarchical(outer=dense, local=3)", 6)
    cohort.average(cohort.inputs(0))
    between, mean = costs.all_reduce(2, 4 * N), costs.all_reduce(3, 4 * N)
    for rank, meter in enumerate(cohort.driver.meters):
        leads = rank % 3 == 0
        spread = costs.broadcast(3, 4 * N, rank % 3, 0)
        assert (meter.sent_bytes, meter.received_bytes) == (
            (between.sent, between.received) if leads else (0, 0)
        )
        assert meter.payload_bytes == (4 * N if leads else 0)
        assert meter.rounds == int(leads)
        assert meter.inside.operations == 2
        assert meter.inside.sent_bytes == mean.sent + spread.sent
        assert meter.inside.received_bytes == mean.received + spread.received
        assert "host all_reduce" in str(meter)
    assert cohort.sessions[0].payload_bytes() == 4 * N


# -- the clock -----------------------------------------------------------------------------------------------


def test_the_simulated_network_is_slow_between_hosts_only() -> None:
    link = Link(latency=0.0, bandwidth=1e6)

    def seconds(method: str, inside: Link | None = None) -> float:
        network = Simulated(8, link, inside=inside)
        cohort = Cohort(method, 8, driver=network)
        cohort.average(cohort.inputs(0))
        return max(network.clocks)

    two_hosts = seconds("hierarchical(outer=dense, local=4)")
    assert two_hosts == pytest.approx(costs.all_reduce(2, 4 * N).sent / 1e6)
    inside = link.seconds_for(costs.all_reduce(4, 4 * N)) + link.seconds_for(costs.broadcast(4, 4 * N, 0, 0))
    assert seconds("hierarchical(outer=dense, local=4)", link) == pytest.approx(two_hosts + inside)
    assert seconds("dense") == pytest.approx(costs.all_reduce(8, 4 * N).sent / 1e6)


@pytest.mark.usefixtures("counted_time")
@pytest.mark.parametrize("outer", ["dense", "topk(ratio=0.01)", "scalecom(ratio=0.1)", "laq(bits=4)"])
def test_a_prediction_is_that_of_the_outer_method_among_hosts(outer: str) -> None:
    shapes = {"wide": (300, 200), "vector": (128,)}
    method = f"hierarchical(outer={outer}, local=4)"
    ours, theirs = predict.profile(method, shapes, 8), predict.profile(outer, shapes, 2)
    assert (ours.sent_bytes, ours.received_bytes) == (theirs.sent_bytes, theirs.received_bytes)
    assert (ours.rounds, ours.hops) == (theirs.rounds, theirs.hops)
    slow = Link(latency=0.01, bandwidth=1e5)
    assert ours.step_seconds(slow) == pytest.approx(theirs.step_seconds(slow), rel=0.01)


# -- periodic averaging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 5])
def test_periodic_averaging_on_two_levels(size: int) -> None:
    """With dense between hosts it is local SGD; a lossy one leaves equal replicas, too."""
    exact = "periodic(every=2, exchange=hierarchical(outer=dense, local=2))"
    ours, plain = Replicas(exact, size), Replicas("localsgd(every=2)", size)
    lossy = Replicas(
        "periodic(every=4, exchange=hierarchical(outer=topk(ratio=0.1), local=2), fragments=2)", size
    )
    for cohort in (ours, plain, lossy):
        cohort.train(range(8))
    assert (flat(ours.models[0]) - flat(plain.models[0])).abs().max() < 1e-5
    for session in lossy.sessions:
        assert bool(session.residuals()) is (session.rank_info.rank % 2 == 0)
    lossy.driver.run([session.sync_program() for session in lossy.sessions])
    for cohort in (ours, lossy):
        assert all(torch.equal(flat(model), flat(cohort.models[0])) for model in cohort.models)


# -- checkpoints ---------------------------------------------------------------------------------------------


def trained(size: int, steps: int = 5) -> Cohort:
    cohort = Cohort("hierarchical(outer=topk(ratio=0.1), local=2)", size)
    for step in range(steps):
        cohort.average(cohort.inputs(step))
    return cohort


@pytest.mark.parametrize(("old", "new"), [(4, 8), (8, 4), (4, 2), (2, 6), (6, 5)])
def test_another_number_of_hosts_gets_all_residuals(old: int, new: int) -> None:
    """What the residuals stand for in the mean is the same as before."""
    before, after = trained(old), Cohort("hierarchical(outer=topk(ratio=0.1), local=2)", new)
    states = [session.sealed() for session in before.sessions]
    hosts = range(0, new, 2)
    for rank, session in enumerate(after.sessions):
        mine = [states[o] for o in range(old) if o // 2 % len(hosts) == rank // 2]
        if rank in hosts and mine:
            session.load_sealed(mine, "sum")
        else:
            session.load_sealed(states[:1], "drop")
    for name, amount in before.residuals().items():
        assert torch.allclose(after.residuals()[name] / new, amount / old, rtol=1e-5, atol=1e-6)
    outputs = after.average(after.inputs(9))
    assert all(same_state(outputs[0], one) for one in outputs)


@pytest.mark.parametrize(("old", "new"), [(4, 8), (8, 4), (6, 5)])
def test_a_checkpoint_of_all_ranks_is_shared_out_among_leaders(old: int, new: int) -> None:
    """As `dcp.load` does: it asks for what `state_dict` has after `expect`."""
    before, after = trained(old), Cohort("hierarchical(outer=topk(ratio=0.1), local=2)", new)
    written = {key: value for session in before.sessions for key, value in session.state_dict().items()}
    for session in after.sessions:
        session.expect(old)
        session.load_state_dict({key: written[key] for key in session.state_dict()})
    for name, amount in before.residuals().items():
        assert torch.allclose(after.residuals()[name] / new, amount / old, rtol=1e-5, atol=1e-6)
    assert all(session.step == 5 for session in after.sessions)


def test_residuals_are_refused_on_a_rank_that_would_never_send_them() -> None:
    states = [session.sealed() for session in trained(4).sessions]
    after = Cohort("hierarchical(outer=topk(ratio=0.1), local=2)", 2)
    kept = memory(after.sessions[1])
    with pytest.raises(StateError, match="does not lead its host"):
        after.sessions[1].load_sealed(states[2:3], "sum")
    with pytest.raises(StateError, match=r"lacks 'error' of 'wide'.*leads its host"):
        after.sessions[0].load_sealed(states[1:2], "sum")
    assert same_state(kept, memory(after.sessions[1]))


def test_a_checkpoint_of_other_hosts_is_refused() -> None:
    state = trained(4).sessions[0].sealed()
    other = Cohort("hierarchical(outer=topk(ratio=0.1), local=4)", 4).sessions[0]
    with pytest.raises(StateError, match="method"):
        other.load_sealed([state], None)


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("hierarchical(inner=topk)", "inner must be dense, fp16 or bf16, not topk"),
        ("hierarchical(outer=a2sgd)", "drifting replicas"),
        ("hierarchical(outer=lasg)", "second gradients"),
        ("hierarchical(local=0)", "local must be a whole number from 1 up"),
        ("hierarchical(outer=hierarchical)", "cannot be inside of another method"),
        ("warmup(method=hierarchical)", r"hierarchical\(outer=warmup\(\.\.\.\)\)"),
        ("route(default=hierarchical)", "cannot be inside of another method"),
        ("route(rules=(('*', hierarchical),))", "cannot be inside of another method"),
    ],
)
def test_what_cannot_be_combined_is_refused(method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(method)


def test_torchft_refuses_it() -> None:
    for method in ("hierarchical", "periodic(exchange=hierarchical)"):
        with pytest.raises(
            ConfigError, match="replica groups of torchft: their groups are not those of hosts"
        ):
            thinwire.attach(mlp(), method, manager=object())


def sharded(worker: Worker) -> str:
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ConfigError) as raised:
        thinwire.attach(fully_shard(mlp()), "hierarchical")
    return str(raised.value)


def test_fsdp_refuses_it() -> None:
    (said,) = run_local(sharded, 1, timeout=400)
    assert "one replica of FSDP2: their groups are not those of hosts and leaders. Give the outer" in said


@pytest.mark.parametrize("given", [None, "", "0", "two"])
def test_the_number_of_ranks_per_host_must_be_known(given: str | None, monkeypatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    if given is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE is .*local=8"):
        Cohort("hierarchical", 4)


def test_the_environment_tells_the_number_of_ranks_per_host(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    (session, *_) = Cohort("hierarchical", 8).sessions
    assert session.method == parse("hierarchical(local=4)")


# -- processes -----------------------------------------------------------------------------------------------

METHOD = "hierarchical(outer=topk(ratio=0.2), local=2)"


def ddp(worker: Worker) -> dict[str, object]:
    found: dict[str, object] = {}
    for method in ("dense", "hierarchical(outer=dense, local=2)", METHOD):
        model = wrap(mlp())
        session = thinwire.attach(model, method, dense_below=0)
        found[method] = train(model, worker.rank, range(6))
        found[f"{method} metrics"] = session.metrics()
        if method == METHOD:
            kept = session.engine.states.entries()
            before = kept
            # One bucket of several is not finite on one rank: no bucket of any rank is committed.
            last = list(model.parameters())[-1]
            hook = last.register_hook(lambda grad: grad * (torch.nan if worker.rank == 3 else 1))
            square_loss(model, worker.rank, 9).backward()
            hook.remove()
            found["kept"] = same_state(before, session.engine.states.entries())
            found["skipped"] = session.meter.skipped_steps
            found["states"] = len(kept)
        session.detach()
    return found


def test_ddp_with_two_hosts_of_two_ranks() -> None:
    everybody = run_local(ddp, 4, timeout=400)
    for rank, found in enumerate(everybody):
        for method in ("hierarchical(outer=dense, local=2)", METHOD):
            assert torch.equal(found[method], everybody[0][method]), f"{method}: rank {rank} differs"
        assert (found["dense"] - found["hierarchical(outer=dense, local=2)"]).abs().max() < 1e-5
        metrics = found[f"{METHOD} metrics"]
        leads = rank % 2 == 0
        assert (metrics["bytes_sent"] > 0) is leads
        assert (metrics["residual_norm"] > 0) is leads
        assert metrics["bytes_sent_inside"] > 0
        assert found["kept"]
        assert found["skipped"] == 1
        assert (found["states"] > 0) is leads
    assert everybody[0][f"{METHOD} metrics"]["bytes_sent"] < everybody[0]["dense metrics"]["bytes_sent"] / 2


def other_hosts(worker: Worker) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = "2" if worker.rank < 2 else "4"
    with pytest.raises(DisagreementError) as raised:
        thinwire.Session(mlp().named_parameters(), "hierarchical")
    return str(raised.value)


def test_ranks_that_disagree_on_their_hosts_are_told() -> None:
    for said in run_local(other_hosts, 4, timeout=400):
        assert "rank 0, 1: hierarchical(outer=topk(ratio=0.01), local=2)" in said
        assert "rank 2, 3: hierarchical(outer=topk(ratio=0.01), local=4)" in said


def periodic(worker: Worker) -> tuple[torch.Tensor, dict[str, float]]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = "periodic(every=4, exchange=hierarchical(outer=topk(ratio=0.2), local=2), overlap=2)"
    session = thinwire.attach(model, method, optimizer=optimizer)
    train(model, worker.rank, range(9), optimizer=optimizer)
    session.sync()
    metrics = session.metrics()
    session.detach()
    return flat(model), metrics


def test_periodic_averaging_in_processes() -> None:
    everybody = run_local(periodic, 4, timeout=400)
    assert all(torch.equal(parameters, everybody[0][0]) for parameters, _ in everybody)
    sent = [metrics["bytes_sent"] for _, metrics in everybody]
    assert min(sent[0], sent[2]) > 2 * max(sent[1], sent[3]), "the others only compare where they are"


def throttled(worker: Worker) -> tuple[float, float]:
    """Seconds of the shortest step between hosts, and of all inside."""
    module = mlp()
    session = thinwire.Session(module.named_parameters(), "hierarchical(outer=dense, local=2)")
    session.throttle("1mbit,latency=1ms")
    zeros = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    taken: list[float] = []
    for _ in range(4):
        before = session.meter.total.seconds
        session.average(zeros)
        taken.append(session.meter.total.seconds - before)
    inside = session.meter.inside.seconds
    session.detach()
    return min(taken), inside


def test_a_throttle_is_between_hosts() -> None:
    entries = sum(p.numel() for p in mlp().parameters())
    link = Link(latency=1e-3, bandwidth=1e6 / 8)
    expected = link.seconds_for(costs.all_reduce(2, 4 * entries))
    (total, _), (none, inside), *_ = run_local(throttled, 4, timeout=400)
    assert total == pytest.approx(expected, rel=0.5)
    assert total > 0.9 * expected
    assert none == 0
    assert inside > 0


def dead_leader(worker: Worker) -> Caught | None:
    model = wrap(mlp())
    session = thinwire.attach(model, METHOD, dense_below=0)
    for number in range(BAD_STEP):
        square_loss(model, worker.rank, number).backward()
    if worker.rank == 2:
        os._exit(7)
    return caught(lambda: square_loss(model, worker.rank, BAD_STEP).backward(), session.detach)


def test_a_dead_leader_is_named_on_every_rank() -> None:
    for outcome in start_local(dead_leader, 4, timeout=400, group_timeout=TIMEOUT):
        if outcome.rank == 2:
            assert outcome.exit_code == 7
            continue
        seen: Caught = outcome.value
        assert seen is not None, f"rank {outcome.rank} did not raise: {outcome}"
        assert seen.kind == "PeerError"
        assert f"of step {BAD_STEP} failed on rank {outcome.rank}" in seen.error
        assert "no word from rank 2: " in seen.error
        assert not seen.threads


# -- hosts of given groups -----------------------------------------------------------------------------------


def by_groups(worker: Worker) -> dict[str, object]:
    """Hosts of ranks 0, 2 and 1, 3: under DDP, in a loop of one's own, and between sync rounds."""
    from torch.distributed.device_mesh import DeviceMesh

    os.environ.pop("LOCAL_WORLD_SIZE", None)
    mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("host", "local"))
    group = mesh["local"].get_group()
    model = wrap(mlp())
    session = thinwire.attach(model, "hierarchical(outer=topk(ratio=0.2))", dense_below=0, inner_group=group)
    found: dict[str, object] = {"ddp": train(model, worker.rank, range(6)), "method": str(session.method)}
    found["residuals"], found["sent"] = bool(session.residuals()), session.meter.sent_bytes
    session.detach()
    module = mlp()
    own = thinwire.Session(module.named_parameters(), "hierarchical(outer=dense)", inner_group=group)
    given = {name: torch.full_like(p, float(worker.rank)) for name, p in module.named_parameters()}
    found["mean"] = {float(value) for mean in own.average(given).values() for value in mean.flatten()}
    own.detach()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    method = "periodic(every=2, exchange=hierarchical(outer=qsgd(bits=4)))"
    session = thinwire.attach(module, method, optimizer=optimizer, inner_group=group)
    train(module, worker.rank, range(4), optimizer=optimizer)
    session.detach()
    found["periodic"] = flat(module)
    return found


def test_hosts_may_be_the_ranks_of_given_groups() -> None:
    everybody = run_local(by_groups, 4, timeout=400)
    for found in everybody:
        assert found["method"] == "hierarchical(outer=topk(ratio=0.2), local=2)"
        assert found["mean"] == {1.5}
        assert torch.equal(found["ddp"], everybody[0]["ddp"])
        assert torch.equal(found["periodic"], everybody[0]["periodic"])
    assert [found["residuals"] for found in everybody] == [True, True, False, False]
    assert [found["sent"] > 0 for found in everybody] == [True, True, False, False]


def wrong_groups(worker: Worker) -> list[str]:
    import torch.distributed as dist

    named = list(mlp().named_parameters())
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    uneven = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    half = dist.new_group([0, 2])
    mine = pairs[worker.rank // 2]
    cases: list[tuple[str, dict[str, object]]] = [
        ("hierarchical", {"inner_group": uneven[worker.rank == 3]}),
        ("hierarchical", {"inner_group": pairs[0]}),  # ranks 2 and 3 are not in it
        ("hierarchical", {"inner_group": dist.group.WORLD if worker.rank == 3 else mine}),
        ("hierarchical(local=4)", {"inner_group": mine}),
        ("topk", {"inner_group": mine}),
    ]
    said: list[str] = []
    for method, options in cases:
        with pytest.raises(ConfigError) as raised:
            thinwire.Session(named, method, **options)
        said.append(str(raised.value))
    if worker.rank in (0, 2):
        with pytest.raises(ConfigError) as raised:
            thinwire.Session(named, "hierarchical", half, inner_group=mine)
        said.append(str(raised.value))
    with pytest.raises(DisagreementError) as different:
        thinwire.Session(named, "hierarchical(local=2)", inner_group=mine if worker.rank else None)
    said.append(str(different.value))
    return said


def test_groups_that_do_not_share_out_the_ranks_are_refused_by_all() -> None:
    everybody = run_local(wrong_groups, 4, timeout=400)
    expected = [
        "inner_group has 1 or 3 ranks, and every host must have as many as the others",
        "inner_group of rank 2 has the ranks [], and that of others differs",
        "inner_group of rank 2 has the ranks [2, 3], and that of others differs",
        "hierarchical: local=4, and inner_group has 2 ranks: leave one of them out",
        "inner_group is for hierarchical, not for topk",
    ]
    for rank, said in enumerate(everybody):
        beyond = ["inner_group of rank 0 has ranks that this session does not have"] if rank in (0, 2) else []
        wanted = [
            *expected,
            *beyond,
            "disagree on hosts: rank 0: the method; rank 1, 2, 3: inner_group",
        ]
        for text, want in zip(said, wanted, strict=True):
            assert want in text


def unknown_host(worker: Worker) -> tuple[str, float]:
    if worker.rank == 1:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    begin = time.perf_counter()
    with pytest.raises(DisagreementError) as raised:
        thinwire.attach(wrap(mlp()), "hierarchical")
    took = time.perf_counter() - begin
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE is not set"):
        thinwire.attach(wrap(mlp()), "hierarchical")
    return str(raised.value), took


def test_a_rank_that_does_not_know_its_host_is_reported_by_all_at_once() -> None:
    for said, took in run_local(unknown_host, 2, timeout=400):
        assert "disagree on hosts: rank 0: the method; rank 1: hierarchical: LOCAL_WORLD_SIZE" in said
        assert "start with torchrun, or give it" in said
        assert took < 45, "without waiting for a timeout"
