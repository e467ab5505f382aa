"""Servers and workers on the virtual clock: convergence, staleness, bytes, faults."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.server.common import EASY, ROWS, SIZE, STRENGTH, cast, matrix, optimum, problem, run, uneven
from tests.server.simulation import Simulation
from thinwire.errors import ConfigError, PeerError, StateError
from thinwire.server import AsyLPG, checkpoint, record, work
from thinwire.server.bound import FEWEST, RECENT, NormBound
from thinwire.server.messages import HEADER_BYTES, Kind, Message, partial, with_text
from thinwire.server.quantiser import Coded, payload_bytes
from thinwire.server.worker import Worker

FULL = {"bits_up": 32, "bits_down": 32}
ACCELERATED = {"variant": "accelerated", "theta_floor": 0.5, "mode": "centered"}


@pytest.mark.parametrize(
    "options",
    [
        FULL,
        {"mode": "paper"},
        {"mode": "centered"},
        pytest.param({"mode": "centered", "bits_down": 3}, marks=pytest.mark.slow),
        pytest.param({"variant": "sparse", "mode": "centered", "keep": 0.8}, marks=pytest.mark.slow),
        {"variant": "sparse", "mode": "paper", "keep": 0.8},
        pytest.param(ACCELERATED, marks=pytest.mark.slow),
        ACCELERATED | {"mode": "paper"},
        pytest.param({"shards": 3, "mode": "centered"}, marks=pytest.mark.slow),
        {"shards": 2, "mode": "paper", "max_staleness": 1},
    ],
    ids=str,
)
def test_every_variant_reaches_the_optimum(options):
    gap = run(**options).objective - optimum()
    assert -1e-12 < gap < 1e-10, f"a gap of {gap:.1e}"


def test_a_fixed_width_of_the_paper_mode_stalls_where_the_rule_does_not():
    stalled = run(mode="paper", bits_down=6, bits_up=8).objective - optimum()
    assert stalled > 1e-8
    assert run(mode="paper", bits_up=8).objective - optimum() < 1e-10


def test_l1_finds_the_zeros():
    result = run(prox="l1", strength=5e-3, mode="centered", epochs=15)
    a, y = matrix()
    x = result.parameters
    gradient = -(a.T @ (y / (1 + np.exp(y * (a @ x))))) / ROWS
    zero = x == 0
    assert 0 < zero.sum() < SIZE
    assert (np.abs(gradient[zero]) <= 5e-3 + 1e-6).all()
    assert np.abs(gradient[~zero] + 5e-3 * np.sign(x[~zero])).max() < 1e-5


def test_one_worker_in_full_precision_is_serial_svrg_step_for_step():
    steps = []
    servers, workers = cast(
        1, server={"on_update": lambda v, x: steps.append(x.copy())}, max_staleness=0, epochs=3, **FULL
    )
    result = Simulation(servers, workers).run()[0]
    a, y = matrix()
    rng = np.random.default_rng((0, 0, 0))

    def gradient(x, rows):
        return -(a[rows].T @ (y[rows] / (1 + np.exp(y[rows] * (a[rows] @ x))))) / len(rows)

    x, expected = np.zeros(SIZE), []
    for _ in range(3):
        snapshot, full = x.copy(), gradient(x, np.arange(ROWS))
        for _ in range(EASY["epoch_length"]):
            rows = rng.integers(0, ROWS, EASY["batch"])
            u = gradient(x, rows) - gradient(snapshot, rows) + full
            x = (x - EASY["lr"] * u) / (1 + EASY["lr"] * STRENGTH)
            expected.append(x)
    assert len(steps) == len(expected) == 3 * EASY["epoch_length"]
    assert np.abs(np.array(steps) - np.array(expected)).max() < 2e-7  # the wire's float32
    assert result.staleness.tolist() == [1500]


@pytest.mark.parametrize(
    ("bound", "shards"),
    [
        *((0, 1), (1, 2), (2, 1), (3, 2), (7, 1)),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in ((0, 2), (1, 1), (2, 2), (3, 1), (7, 2))),
    ],
)
def test_staleness_stays_within_its_bound(bound, shards):
    servers, workers = cast(5, shards, max_staleness=bound, epochs=2, mode="centered")
    pauses = np.random.default_rng(bound)
    slow = lambda worker, update: pauses.pareto(1.0) * (20 if worker == 4 else 1)  # noqa: E731
    results = Simulation(servers, workers, seconds=slow).run()
    for result in results:
        assert len(result.staleness) == bound + 1
        assert result.staleness.sum() == result.updates == 2 * EASY["epoch_length"]
    assert results[0].staleness[bound] > 0, "the bound was never reached: this run shows nothing"


def test_slow_workers_do_not_hold_up_the_others():
    servers, workers = cast(4, max_staleness=1000, epochs=1)
    Simulation(servers, workers, seconds=lambda worker, update: 50.0 if worker == 0 else 1.0).run()
    shares = [worker.updates for worker in workers]
    assert shares[0] < 0.05 * EASY["epoch_length"]
    assert min(shares[1:]) > 0.3 * EASY["epoch_length"]


@pytest.mark.parametrize(
    "options",
    [FULL, {"mode": "centered", "bits_down": 3, "bits_up": 5}, {"variant": "sparse", "bits_down": 8}],
)
def test_metered_bytes_are_those_of_the_formula(options):
    result = run(epochs=2, **options)
    by = result.meter.by_operation
    asked = AsyLPG(**{**EASY, "epochs": 2, **options})
    updates = 2 * EASY["epoch_length"]
    raw = 4 * SIZE
    assert by["send snapshot"].payload_bytes == by["send snapshot"].operations * raw == 3 * 4 * raw
    down = raw if asked.bits_down == 32 else payload_bytes(asked.bits_down or 0, SIZE, SIZE)
    sent = by["send parameters"]
    assert sent.operations == updates
    # The first parameters of an epoch are the snapshot's: a token without bytes.
    tokens = 0 if asked.bits_down == 32 else updates - sent.payload_bytes // down
    assert sent.payload_bytes == (updates - tokens) * down
    assert tokens <= 2 * 4
    assert sent.overhead_bytes == updates * HEADER_BYTES
    got = by["receive update"]
    payload = got.received_bytes - got.operations * (HEADER_BYTES + 96)
    if asked.variant == "sparse":
        assert 0 < payload < updates * payload_bytes(4, SIZE, SIZE)
    else:
        up = raw if asked.bits_up == 32 else payload_bytes(asked.bits_up, SIZE, SIZE)
        assert payload <= updates * up
        assert payload > (updates - 10) * up


def test_records_count_the_bits_of_both_ways():
    history = run(epochs=3, mode="centered", bits_down=4, bits_up=4).history
    assert [record.epoch for record in history] == [0, 1, 2, 3]
    assert [record.updates for record in history] == [0, 500, 1000, 1500]
    assert history[0].bits == 0
    # an epoch: 4 snapshots and 4 partial sums in float32, 500 times 4 bits and a scale either way
    epoch = 500 * (4 * SIZE + 32)
    for before, after in itertools.pairwise(history):
        assert 0.97 * epoch <= after.bits_down - before.bits_down - 4 * 32 * SIZE <= epoch
        assert 0.97 * epoch <= after.bits_up - before.bits_up - 4 * 32 * SIZE <= epoch
        assert after.wire_bytes - before.wire_bytes > (after.bits - before.bits) / 8


@pytest.mark.parametrize(
    ("shards", "at"),
    [(1, 1), (3, 124), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in ((1, 124), (3, 1)))],
)
def test_the_others_go_on_without_a_worker_that_died(shards, at):
    servers, workers = cast(4, shards, mode="centered")
    result = Simulation(servers, workers, seconds=uneven(), deaths={2: at, 1: at + 1}).run()[0]
    assert result.objective - optimum() < 1e-10
    assert len(result.lost) == 2
    assert result.dropped == 2
    assert result.updates >= 10 * EASY["epoch_length"] - 2


def test_a_worker_that_dies_between_two_shards_leaves_no_hole():
    """Its sum has come to one shard and not to the other: the other has it summed again."""
    servers, workers = cast(3, 2, mode="centered", epochs=3)

    def cut(number, shard, message):
        return number == 1 and shard == 0 and message.kind == Kind.PARTIAL and message.epoch == 1

    results = Simulation(servers, workers, seconds=uneven(), cut=cut).run()
    assert [len(result.lost) for result in results] == [1, 1]
    assert [record.epoch for record in results[0].history] == [0, 1, 2, 3]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_worker_may_join_late(shards):
    servers, workers = cast(4, shards, mode="centered", epochs=4)
    for server in servers:
        server.workers = 3
    simulation = Simulation(servers, workers, seconds=uneven(), joins={3: 700.0})
    result = simulation.run()[0]
    assert 0 < workers[3].updates < max(worker.updates for worker in workers)
    assert result.lost == []
    assert sorted(simulation.final) == [0, 1, 2, 3]


def test_a_restarted_worker_takes_the_place_of_its_old_self():
    servers, workers = cast(3, mode="centered", epochs=4)
    _, (again, *_) = cast(3, mode="centered", epochs=4)
    simulation = Simulation(servers, [*workers, again], seconds=uneven(), joins={3: 900.0}, deaths={0: 150})
    result = simulation.run()[0]
    assert len(result.lost) == 1
    assert again.updates > 0
    assert sorted(simulation.final) == [1, 2, 3]


def test_too_few_workers_end_the_run():
    servers, workers = cast(3, server={"min_workers": 2})
    with pytest.raises(PeerError, match="min_workers is 2"):
        Simulation(servers, workers, deaths={0: 5, 1: 9}).run()


def test_a_worker_with_other_options_is_told_what_differs():
    servers, workers = cast(2)
    _, (other, *_) = cast(2, bits_up=8)
    simulation = Simulation(servers, [*workers, other])
    simulation.run()
    assert "bits_up=8" in str(simulation.errors[2])
    assert "the server 4" in str(simulation.errors[2])


def test_the_last_worker_may_restart_before_its_old_connection_breaks():
    servers, workers = cast(1, mode="centered", epochs=4)
    _, (again,) = cast(1, mode="centered", epochs=4)
    simulation = Simulation(servers, [*workers, again], seconds=uneven(), joins={1: 900.0})
    result = simulation.run()[0]
    assert result.lost == ["worker 0: was replaced by a worker that joined with its index"]
    assert result.updates == 4 * EASY["epoch_length"]
    assert min(workers[0].updates, again.updates) > 0
    assert "another worker has joined with its index 0" in str(simulation.errors[0])
    assert sorted(simulation.final) == [1]


def test_of_two_workers_with_one_index_the_later_stays():
    servers, workers = cast(2, mode="centered", epochs=4, server={"min_workers": 2})
    _, (twin, _) = cast(2, mode="centered", epochs=4)
    simulation = Simulation(servers, [*workers, twin], seconds=uneven(), joins={2: 500.0})
    result = simulation.run()[0]
    assert sorted(simulation.final) == [1, 2]
    assert result.objective - optimum() < 1e-3
    assert result.updates == 4 * EASY["epoch_length"]


def test_an_index_beyond_the_workers_is_refused():
    servers, workers = cast(2, mode="centered", epochs=1)
    _, strangers = cast(2, mode="centered", epochs=1)
    strangers[0].index = 7
    simulation = Simulation(servers, [*workers, strangers[0]], joins={2: 100.0})
    result = simulation.run()[0]
    assert "its index is 7, and the 2 workers have indices from 0 to 1" in str(simulation.errors[2])
    assert strangers[0].updates == 0
    assert result.lost == []
    with pytest.raises(ConfigError, match="index must be from 0 to 1 with 2 workers, not 7"):
        work(problem(), AsyLPG(), index=7, workers=2, store=object())


def test_too_few_workers_may_come_back_in_time(monkeypatch):
    (server,), _ = cast(1)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    server.start(Transport(), rejoin_within=30.0)
    hello = with_text(Kind.HELLO, server.agreement.to_json(), version=0)
    server.receive(0, hello)
    server.lose(0, "gone")
    now[0] += 29
    server.tick()
    server.receive(1, hello)
    now[0] += 60
    server.tick()
    server.lose(1, "gone")
    now[0] += 31
    with pytest.raises(PeerError, match="0 workers left"):
        server.tick()


class Poison:
    """The easy problem, but after 20 differences every other one is reversed and a million times as long."""

    def __init__(self) -> None:
        self._honest, self._count = problem(), 0

    def __getattr__(self, name):
        return getattr(self._honest, name)

    def difference(self, x, snapshot, rows):
        self._count += 1
        found = self._honest.difference(x, snapshot, rows)
        return -1e6 * found if self._count > 20 and self._count % 2 else found


@pytest.mark.parametrize("options", [{"mode": "centered"}, {"mode": "paper", "variant": "sparse"}], ids=str)
def test_poisoned_updates_are_rejected_and_counted(options):
    def outcome(**server):
        servers, workers = cast(4, server=server, epochs=6, **options)
        bad = Worker(Poison(), servers[0].agreement, 3)
        return Simulation(servers, [*workers[:3], bad]).run()[0]

    result = outcome(reject_above=100.0)
    assert result.objective - optimum() < 1e-6
    assert set(result.rejected) == {3}
    assert result.rejected[3] > 100
    assert result.updates == 6 * EASY["epoch_length"]
    assert outcome().objective > 10, "without the bound the model is poisoned"


@pytest.mark.parametrize("options", [{}, {"variant": "sparse", "keep": 0.3}, {"bits_up": 2}], ids=str)
def test_honest_updates_are_not_rejected(options):
    servers, workers = cast(4, server={"reject_above": 100.0}, epochs=4, batch=1, lr=0.3, **options)
    assert Simulation(servers, workers, seconds=uneven()).run()[0].rejected == {}


@given(st.lists(st.floats(0, 1e12), max_size=300), st.floats(1.5, 100))
def test_the_bound_is_that_of_the_median_of_the_last_norms(norms, ratio):
    bound, seen = NormBound(ratio), []
    for norm in norms:
        last = sorted(seen[-RECENT:])
        expected = norm == 0 or len(last) < FEWEST or norm <= ratio * last[len(last) // 2]
        assert bound.accepts(norm) == expected
        seen += [norm] if norm else []


def test_a_lasting_change_is_soon_accepted():
    bound = NormBound(10.0)
    assert all(bound.accepts(1.0) for _ in range(RECENT))
    answers = [bound.accepts(50.0) for _ in range(RECENT)]
    assert not any(answers[: RECENT // 2])
    assert all(answers[RECENT // 2 + 1 :])


class Transport:
    """A server's transport, for a test that plays all workers itself."""

    def __init__(self):
        self.sent, self.dropped = [], []

    def send(self, connection, message):
        self.sent.append((connection, message))

    def drop(self, connection, reason):
        self.dropped.append(connection)

    def close(self):
        pass


def test_messages_of_an_old_epoch_are_discarded_and_nonsense_costs_the_worker_its_place():
    (server,), _ = cast(2, epochs=2)
    transport = Transport()
    server.start(transport)
    for connection in (0, 1):
        text = server.agreement.to_json()
        server.receive(connection, with_text(Kind.HELLO, text, version=connection))
    for connection in (0, 1):
        server.receive(connection, partial(0, connection, 1.0, np.zeros(SIZE), one_way=False))
    assert [m.kind for _, m in transport.sent[-2:]] == [Kind.PARAMETERS] * 2
    server.receive(0, Message(Kind.UPDATE, 7, 0))
    assert server.discarded == 1
    assert server.state.version == 0
    server.receive(1, Message(Kind.UPDATE, 0, 5))  # not the version it was given
    assert transport.dropped == [1]
    assert list(server.peers) == [0]


def test_a_checkpoint_goes_on_where_it_was_written(tmp_path):
    file = tmp_path / "state"
    copies = []

    def save(server):
        checkpoint.save(server, file)
        copies.append(file.read_bytes())

    run_options = {"mode": "centered", "epochs": 8, "variant": "accelerated", "theta_floor": 0.5}
    servers, workers = cast(3, server={"on_save": save, "save_every": 130}, **run_options)
    whole = Simulation(servers, workers, seconds=uneven()).run()[0]
    file.write_bytes(copies[6])
    servers, workers = cast(3, **run_options)
    checkpoint.load(servers[0], file)
    state = servers[0].state
    assert (state.epoch, state.applied, state.version) == (1, 150, 650)
    result = Simulation(servers, workers, seconds=uneven(2)).run()[0]
    assert result.updates == whole.updates == 8 * 500
    assert [record.epoch for record in result.history] == list(range(9))
    assert result.history[:2] == whole.history[:2]
    assert result.objective == pytest.approx(whole.objective, rel=1e-3)


def test_a_finished_run_goes_on_for_more_epochs(tmp_path):
    file = tmp_path / "state"
    save = {"on_save": lambda server: checkpoint.save(server, file)}
    Simulation(*cast(3, server=save, epochs=2, mode="centered"), seconds=uneven()).run()
    servers, workers = cast(3, epochs=10, mode="centered")
    checkpoint.load(servers[0], file)
    result = Simulation(servers, workers, seconds=uneven(2)).run()[0]
    assert [record.epoch for record in result.history] == list(range(11))
    assert result.updates == 10 * EASY["epoch_length"]
    assert result.objective - optimum() < 1e-10
    (shorter,), _ = cast(3, epochs=1, mode="centered")
    with pytest.raises(StateError, match="is of epoch 2, and this run has 1 epochs: set epochs higher"):
        checkpoint.load(shorter, file)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    file = tmp_path / "state"
    servers, _ = cast(3)
    checkpoint.save(servers[0], file)
    others, _ = cast(3, bits_up=8)
    with pytest.raises(StateError, match="bits_up=4"):
        checkpoint.load(others[0], file)
    with pytest.raises(StateError, match="state's shard is 0, this session's is 1"):
        checkpoint.load(cast(3, 2)[0][1], file)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(StateError, match="not a checkpoint"):
        checkpoint.load(servers[0], file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "1"}, "format is 1, this version reads 2"),
        ({"epoch": "-1"}, "epoch is -1"),
        ({"version": "true"}, "version is True"),
        ({"applied": None}, "it has no 'applied'"),
        ({"summed": "3"}, "summed is 3, not true or false"),
        ({"history": "[1]"}, r"history\[0\] must be"),
        ({"history": '[{"epoch": 0}]'}, r"history\[0\] .* it has no 'objective'"),
        ({"agreement": "17"}, "cannot be read"),
        ({"epoch": "{"}, "not a checkpoint"),
        ({"x": None}, "it has no 'x'"),
        ({"x": np.zeros(3)}, r"x is a float64 tensor of shape \(3,\)"),
        ({"full": np.zeros(SIZE, np.float32)}, "full is a float32 tensor"),
        ({"snapshot": np.full(SIZE, np.nan)}, "snapshot has entries that are not finite"),
        ({"y": np.ones(SIZE)}, "checksum"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_checkpoint_is_named_and_nothing_is_loaded(tmp_path, change, says):
    file = tmp_path / "state"
    (server,), _ = cast(3)
    checkpoint.save(server, file)
    with safe_open(file, framework="np") as saved:
        arrays = {name: saved.get_tensor(name) for name in saved.keys()} | change  # noqa: SIM118
        about = saved.metadata() | change
    arrays = {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)}
    save_file(arrays, file, {name: value for name, value in about.items() if isinstance(value, str)})
    before = server.state
    with pytest.raises(StateError, match=says):
        checkpoint.load(server, file)
    assert server.state is before


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "state"
    (server,), _ = cast(3)
    checkpoint.save(server, file)
    before = file.read_bytes()

    def fail(descriptor):
        raise OSError("the disk is full")

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    server.state.epoch = 5
    with pytest.raises(OSError, match="the disk is full"):
        checkpoint.save(server, file)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "options",
    [
        {"bits_up": 1},
        {"bits_down": 40},
        {"variant": "fast"},
        {"mode": "auto"},
        {"mu": 0},
        {"max_staleness": -1},
        {"epoch_length": 0},
        {"prox": "l1"},
        {"strength": 0.1},
        {"lr": float("nan")},
        {"lr_schedule": "cosine"},
        {"keep": 0},
        {"variant": "sparse", "bits_up": 32},
    ],
    ids=str,
)
def test_bad_options_are_named(options):
    with pytest.raises(ConfigError, match=f"asylpg: .*{next(reversed(options))}|strength"):
        AsyLPG(**options)


def test_learning_rates_follow_their_schedule():
    assert [AsyLPG(lr=2.0, lr_schedule="inverse").rate(s) for s in range(3)] == [2.0, 1.0, 2.0 / 3]
    assert AsyLPG(lr=2.0, lr_schedule=lambda epoch: 0.5**epoch).rate(3) == 0.25
    assert AsyLPG(variant="accelerated", lr=1.0).rate(2) == 2.0


NOT_FAULTS = st.sampled_from([kind for kind in Kind if kind not in (Kind.FAULT, Kind.HELLO)])
MESSAGES = st.builds(
    lambda kind, epoch, version, form, entries, noise, one_way: Message(
        kind, epoch, version, Coded(form, entries, 1.0, np.frombuffer(noise, np.uint8)), one_way
    ),
    NOT_FAULTS,
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from([0, 4, 254, 255]),
    st.integers(0, SIZE + 1),
    st.binary(max_size=4 * SIZE + 8),
    st.booleans(),
)


@given(st.lists(MESSAGES, max_size=12))
def test_whatever_one_worker_sends_the_server_keeps_count(messages):
    (server,), _ = cast(2, epochs=2)
    server.start(Transport())
    for connection in (0, 1):
        server.receive(connection, with_text(Kind.HELLO, server.agreement.to_json(), version=connection))
    for message in messages:
        server.receive(1, message)
    assert 0 in server.peers
    assert server.tickets <= server.options.max_staleness + 1
    assert server.state.applied + server.tickets <= server.options.epoch_length
    assert server.state.staleness.sum() == server.state.version
    assert np.isfinite(server.state.x).all()


def test_the_line_on_the_terminal_says_how_it_goes(capsys):
    servers, workers = cast(2, epochs=1)
    Simulation(servers, workers).run()
    line = record.ProgressLine(servers[0])
    line.tick()
    assert "epoch 1/1" in capsys.readouterr().err
    line.close()
    line = record.status(servers[0], time.monotonic() - 1)
    for word in ("epoch 1/1", "objective 0.", "updates/s", "staleness", "MB"):
        assert word in line
