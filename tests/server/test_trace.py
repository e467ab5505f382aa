"""What is sent within an epoch, one-sided quantisation, and the momentum of the accelerated variant."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from tests.server.common import EASY, SIZE, cast, optimum, problem, run, uneven
from tests.server.simulation import Simulation
from thinwire.errors import ConfigError
from thinwire.server import AsyLPG, LinearProblem, record, serve
from thinwire.server.messages import Kind, Message
from thinwire.server.options import Agreement
from thinwire.server.quantiser import payload_bytes
from thinwire.server.server import Server
from thinwire.server.worker import Worker

UPDATES = EASY["epoch_length"]
DOWN, UP = (Kind.SNAPSHOT, Kind.PARAMETERS), (Kind.PARTIAL, Kind.UPDATE)
VARIANTS = [
    {"mode": "paper"},
    {"mode": "centered", "bits_down": 3},
    pytest.param({"mode": "paper", "variant": "sparse"}, marks=pytest.mark.slow),
    {"mode": "paper", "variant": "accelerated"},
]


class Watched(Server):
    """Adds up the sizes of all messages itself."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.down = self.up = 0
        self.seen: list[tuple[int, int]] = []

    def receive(self, connection: int, message: Message) -> None:
        # Of a partial sum the method sends the gradient; the loss is for the record.
        extra = {Kind.PARTIAL: -64, Kind.UPDATE: 0}.get(message.kind)
        if extra is not None:
            self.up += _bits(message) + extra
        super().receive(connection, message)

    def _send(self, connection: int, message: Message) -> None:
        if message.kind in DOWN:
            self.down += _bits(message)
        super()._send(connection, message)

    def _apply(self, peer) -> None:
        super()._apply(peer)
        self.seen.append((self.down, self.up))


def _bits(message: Message) -> int:
    scale = 0 if message.coded.form == 255 else 32
    return 8 * len(message.coded.payload) + scale


def watched(trace_every: int, given: LinearProblem | None = None, workers: int = 4, **options):
    """A run's result with its trace, and the server."""
    given, asked = given or problem(), AsyLPG(**{**EASY, **options})
    agreement = Agreement(asked, given.size, given.rows, 1, workers)
    server = Watched(agreement, 0, given.start(), workers=workers, trace_every=trace_every)
    result = Simulation(
        [server], [Worker(given, agreement, i) for i in range(workers)], seconds=uneven()
    ).run()[0]
    mean = lambda x: given.total(x, 0, given.rows)[0] / given.rows + asked.penalty(x)  # noqa: E731
    result.trace = record.trace(server.points, result.history, mean)
    return result, server


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_bits_grow_with_every_update_and_are_the_sum_of_all_messages(options):
    result, server = watched(1, epochs=2, **options)
    inside = [point for point, _ in server.points]
    assert [point.updates for point in inside] == list(range(1, 2 * UPDATES + 1))
    assert [(point.bits_down, point.bits_up) for point in inside] == server.seen
    for name in ("bits_down", "bits_up", "wire_bytes", "seconds"):
        values = [getattr(point, name) for point in inside]
        assert values == sorted(values)
    # Updates that had to wait are applied together: no more than there are workers.
    assert all(after.bits > before.bits for before, after in zip(inside, inside[4:], strict=False))
    assert {point.epoch for point in inside} == {0, 1}
    last = inside[-1]
    # All of the epoch is given out before its last update comes: the snapshot's record is the same.
    assert (last.bits_down, last.bits_up) == (result.history[-1].bits_down, result.history[-1].bits_up)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_trace_joins_the_snapshots(options):
    result, server = watched(50, epochs=3, **options)
    assert [point.updates for point in result.trace] == list(range(0, 3 * UPDATES + 1, 50))
    assert [point for point in result.trace if point.updates % UPDATES == 0] == result.history
    gaps = [point.objective - optimum() for point in result.trace]
    assert min(gaps) > -1e-12
    assert all(np.isfinite(gaps))
    # Just before an epoch ends the trace is where the snapshot will be.
    ends = {point.updates: x for point, x in server.points}
    assert np.abs(ends[3 * UPDATES] - result.parameters).max() < 1e-6


def test_a_trace_changes_nothing():
    plain, traced = run(epochs=2), watched(7, epochs=2)[0]
    assert np.array_equal(plain.parameters, traced.parameters)
    assert [r.bits for r in plain.history] == [r.bits for r in traced.history]


def test_a_trace_is_asked_for_in_whole_updates_of_one_shard():
    for options, says in (({"trace_every": 0}, "trace_every"), ({"trace_every": 5, "shards": 2}, "shards=1")):
        with pytest.raises(ConfigError, match=says):
            serve(problem(), AsyLPG(), workers=1, store=object(), **options)


# --- one way only ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["paper", "centered"])
@pytest.mark.parametrize(
    ("options", "down", "up"),
    [
        ({"bits_down": 32, "bits_up": 4}, 32, 4),  # gradients only
        ({"bits_down": 6, "bits_up": 32}, 6, 32),  # the model only
        ({"bits_down": 32, "bits_up": 32}, 32, 32),
    ],
    ids=["gradients", "model", "none"],
)
def test_one_sided_quantisation_sends_its_bits_each_way(mode, options, down, up):
    _, server = watched(1, epochs=1, mode=mode, **options)
    by = server.meter.by_operation
    sent, got = by["send parameters"], by["receive update"]
    assert sent.operations == got.operations == UPDATES
    received = got.received_bytes - got.operations * (28 + 96)
    for bits, found in ((down, sent.payload_bytes), (up, received)):
        each = 4 * SIZE if bits == 32 else payload_bytes(bits, SIZE, SIZE)
        # A vector of zeros (no step yet) is a token, unless it travels as it is.
        assert found == UPDATES * each if bits == 32 else (UPDATES - 5) * each <= found <= UPDATES * each


@pytest.mark.parametrize(
    "options", [{"bits_down": 32}, {"bits_up": 32}, {"bits_down": 32, "variant": "sparse"}]
)
def test_one_sided_quantisation_converges(options):
    assert run(**options).objective - optimum() < 1e-10


def test_the_model_only_takes_the_bits_of_the_rule():
    assert run(bits_up=32, mode="paper", epochs=3).history[-1].bits_down < 0.6 * 32 * SIZE * 3 * UPDATES


# --- momentum ----------------------------------------------------------------------------------------------

STEEP = {
    "epochs": 30,
    "epoch_length": 60,
    "batch": 8,
    "prox": "none",
    "strength": 0.0,
    "max_staleness": 4,
    "bits_up": 6,
}


def steep() -> LinearProblem:
    """Least squares whose curvatures span four orders of magnitude; the least objective is 0."""
    rng = np.random.default_rng(3)
    a = rng.normal(size=(400, 20)) * np.logspace(0, -2, 20)
    a /= np.abs(np.linalg.norm(a, axis=1)).max()
    return LinearProblem(csr_matrix(a), a @ (rng.normal(size=20) * np.logspace(0, 1, 20)), "squares")


def first(history, level: float) -> int:
    return next((r.epoch for r in history if r.objective <= level), 10**6)


def test_theta_is_the_schedule_of_the_paper():
    accelerated = AsyLPG(variant="accelerated", lr=3.0)
    assert accelerated.theta_floor == 0
    assert [accelerated.theta(s) for s in range(4)] == [1.0, 2 / 3, 0.5, 0.4]
    assert [accelerated.rate(s) * accelerated.theta(s) for s in range(4)] == pytest.approx([3.0] * 4)
    assert AsyLPG(variant="accelerated", theta_floor=0.45).theta(9) == 0.45


def test_momentum_moves_the_iterates():
    """x = x~ + theta (y - x~), and y leaves x~ behind: with theta = 1 there is no momentum."""
    paths = []
    for floor in (0.0, 1.0):
        states = []
        servers, workers = cast(
            1, variant="accelerated", theta_floor=floor, epochs=4, mode="paper", max_staleness=0
        )
        server = servers[0]
        server._on_update = lambda _, x, s=server, to=states: to.append(
            (x.copy(), s.state.y.copy(), s.state.snapshot)
        )
        Simulation(servers, workers).run()
        paths.append(states)
    moving, still = paths
    assert np.array_equal(moving[UPDATES - 1][0], still[UPDATES - 1][0]), "theta is 1 in the first epoch"
    for (x, y, snapshot), theta in ((moving[UPDATES], 2 / 3), (moving[-1], 2 / 5)):
        assert np.allclose(x - snapshot, theta * (y - snapshot))
        assert np.linalg.norm(y - x) > 0.3 * np.linalg.norm(x - snapshot) > 0
    assert all(np.allclose(x, y, rtol=1e-12) for x, y, _ in still)
    assert np.linalg.norm(moving[UPDATES + 5][0] - still[UPDATES + 5][0]) > 1e-6


@pytest.mark.parametrize("mode", ["paper", "centered"])
def test_momentum_needs_fewer_epochs_on_an_ill_conditioned_problem(mode):
    given = steep()
    lr = 0.5 / given.smoothness
    histories = {
        label: watched(1000, given, mode=mode, lr=lr, **STEEP, **options)[0].history
        for label, options in {
            "none": {},
            "mean": {"variant": "accelerated", "theta_floor": 1.0},
            "accelerated": {"variant": "accelerated"},
        }.items()
    }
    level = histories["none"][-1].objective
    assert level < 0.2 * histories["none"][0].objective
    epochs = first(histories["accelerated"], level)
    assert epochs <= 0.7 * STEEP["epochs"], f"{epochs} epochs against {STEEP['epochs']}"
    assert first(histories["mean"], level) >= 0.9 * STEEP["epochs"], "the mean alone is not what helps"


def test_the_paper_schedule_goes_on_converging_where_a_floor_makes_it_linear():
    gaps = [r.objective - optimum() for r in run(variant="accelerated", mode="paper").history]
    assert gaps[10] < 0.3 * gaps[5] < 0.05 * gaps[1]
    floored = run(variant="accelerated", mode="paper", theta_floor=0.5).objective - optimum()
    assert floored < 1e-3 * gaps[10]
