"""lazy_gd: what the algorithms promise, and one result whatever carries it."""

import math
import time
from dataclasses import replace

import pytest
import torch

from tests.convex.problems import Problem, Squares, squares
from thinwire import ConfigError, ThinwireError
from thinwire.convex import Descent, Known, Objective, Trace, lazy_gd, lazy_gd_steps
from thinwire.net.launch import WorkerFailedError

ALGORITHMS = ("gd", "qgd", "lag-wk", "lag-ps", "laq")
ZERO = torch.zeros(6, dtype=torch.float64)


def run(
    problem: Problem, algorithm: str, iterations: int = 400, gap: float | None = 1e-9, **options
) -> Trace:
    settings = {
        key: options.pop(key) for key in ("window", "xi", "bits", "max_skip", "float_bits") if key in options
    }
    how = Descent(algorithm, problem.step, smoothness=problem.smoothness, **settings)
    return lazy_gd(
        problem.objectives, ZERO, how, iterations=iterations, optimum=problem.optimum, gap=gap, **options
    )


def by_hand(problem: Problem, iterations: int) -> torch.Tensor:
    theta = ZERO
    for _ in range(iterations - 1):
        theta = theta - problem.step * sum(share.gradient(theta) for share in problem.shares)
    return theta


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_come_to_the_optimum_and_lazy_ones_upload_less(algorithm: str) -> None:
    problem = squares()
    trace, plain = run(problem, algorithm), run(problem, "gd")
    assert trace.last.gap < 1e-9
    assert (trace.theta - problem.best).norm() < 1e-4
    if algorithm in ("lag-wk", "lag-ps", "laq"):
        assert trace.last.uploads < 0.6 * plain.last.uploads
    if algorithm == "lag-ps":
        assert trace.last.gradients == trace.last.uploads, "computed only where the server asks"
    else:
        assert trace.last.gradients == 5 * trace.last.number


def test_gd_is_gradient_descent() -> None:
    problem = squares()
    trace = run(problem, "gd", iterations=60, gap=None)
    # Differences travel in float32, and what one loses is part of the next.
    assert (trace.theta - by_hand(problem, 60)).abs().max() < 1e-10


@pytest.mark.parametrize("algorithm", ["lag-wk", "lag-ps"])
def test_xi_0_is_gradient_descent_bit_for_bit(algorithm: str) -> None:
    problem = squares()
    lazy, plain = run(problem, algorithm, xi=0.0), run(problem, "gd")
    assert torch.equal(lazy.theta, plain.theta)
    assert lazy.last.uploads == plain.last.uploads


def test_laq_with_32_bits_is_lag() -> None:
    problem = squares()
    laq, lag = run(problem, "laq", bits=32, xi=0.1, max_skip=10_000), run(problem, "lag-wk", xi=0.1)
    assert torch.equal(laq.theta, lag.theta)
    assert [one.uploaders for one in laq.iterations] == [one.uploaders for one in lag.iterations]


@pytest.mark.parametrize("limit", [0, 3, 7])
def test_nobody_is_silent_for_longer_than_max_skip(limit: int) -> None:
    trace = run(squares(), "laq", iterations=80, gap=None, max_skip=limit, xi=100.0)
    assert max(max(one.silence) for one in trace.iterations) == limit


def test_bits_are_those_of_the_uploads() -> None:
    problem = squares()
    for algorithm, bits, each in (
        ("lag-wk", 4, 32 * 6),
        ("laq", 4, 32 + 24),
        ("laq", 8, 32 + 48),
        ("qgd", 1, 40),
    ):
        last = run(problem, algorithm, bits=bits, iterations=30).last
        assert last.bits == each * last.uploads


def test_the_upload_bound_of_the_paper() -> None:
    """If L_m^2 <= xi / (d a^2 M^2), worker m uploads at most k / (d + 1) times in k iterations (and once)."""
    problem, found = squares(spread=3.0), 0
    xi, k = 1.0, 200
    trace = run(problem, "lag-ps", iterations=k, gap=None, xi=xi)
    for worker, smoothness in enumerate(problem.smoothness):
        d = min(10, math.floor(xi / (smoothness * problem.step * len(problem.shares)) ** 2))
        if d >= 1:
            uploads = sum(worker in one.uploaders for one in trace.iterations)
            assert uploads <= k / (d + 1) + 1, (worker, d)
            found += 1
    assert found >= 2, "the problem has workers to which the bound applies"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lock_step_gives_the_same_bits_as_the_loop(algorithm: str) -> None:
    problem = squares()
    loop, ranks = run(problem, algorithm), run(problem, algorithm, by="lockstep")
    assert torch.equal(loop.theta, ranks.theta)
    assert loop.iterations == ranks.iterations
    sent = sum(meter.sent_bytes for meter in ranks.meters)
    assert sent > 0


@pytest.mark.parametrize("algorithm", ["gd", "lag-wk", "lag-ps"])
def test_uploads_in_float64_lose_nothing_on_the_way(algorithm: str) -> None:
    problem = squares()
    loop = run(problem, algorithm, float_bits=64)
    ranks = run(problem, algorithm, float_bits=64, by="lockstep")
    assert torch.equal(loop.theta, ranks.theta)
    # Twice the bits of float32 for as many uploads.
    assert loop.last.bits == 64 * loop.theta.numel() * loop.last.uploads


@pytest.mark.parametrize("algorithm", ["laq", "lag-ps"])
def test_processes_give_the_same_bits_as_the_loop(algorithm: str) -> None:
    problem, seen = squares(workers=3), []
    loop = run(problem, algorithm, iterations=60)
    ranks = run(problem, algorithm, iterations=60, by="processes", on_iteration=seen.append)
    assert torch.equal(loop.theta, ranks.theta)
    assert loop.iterations == ranks.iterations == seen
    assert all(meter.sent_bytes > 0 for meter in ranks.meters)


def test_a_server_sends_parameters_only_where_it_asks() -> None:
    problem = squares()
    trace = run(problem, "lag-ps", by="lockstep")
    asked = sum(worker > 0 for one in trace.iterations for worker in one.uploaders)
    idle = 4 * (trace.last.number + 1)
    assert trace.meters[0].by_operation["send"].operations == idle + asked
    assert trace.meters[0].payload_bytes == idle + 8 * 6 * asked
    assert sum(meter.payload_bytes for meter in trace.meters[1:]) == 4 * 6 * asked


def test_a_slow_worker_delays_only_the_iterations_that_ask_it() -> None:
    """Processes; the gradient of one that is seldom asked takes 0.5 s."""
    nap, problem = 0.5, squares(workers=3, spread=2.0)
    order = (2, 1, 0)
    shares = [problem.shares[worker] for worker in order]
    slow = [shares[0], replace(shares[1], nap=nap), shares[2]]
    times: dict[bool, list[float]] = {False: [], True: []}
    for naps, seen in times.items():
        trace = run(
            Problem(slow if naps else shares),
            "lag-ps",
            iterations=40,
            gap=None,
            by="processes",
            on_iteration=lambda _, seen=seen: seen.append(time.monotonic()),
        )
    asked = sum(1 in one.uploaders for one in trace.iterations[1:])
    assert 0 < asked < 15, "mostly not asked"
    extra = (times[True][-1] - times[True][0]) - (times[False][-1] - times[False][0])
    assert extra < asked * nap + 10 * nap, "not one nap for each of 40 iterations"
    assert times[True][-1] - times[True][0] > asked * nap


def test_it_goes_on_from_what_is_known() -> None:
    problem = squares()
    first = run(problem, "gd", iterations=5, gap=None)
    last = [share.gradient(first.theta) for share in problem.shares]
    how = Descent("gd", problem.step)
    known = Known(last)
    begun = lazy_gd(problem.objectives, first.theta, how, iterations=1, known=known)
    assert torch.allclose(sum(last), sum(share.gradient(begun.theta) for share in problem.shares))
    lazy = replace(how, algorithm="lag-wk")
    again = lazy_gd(problem.objectives, first.theta, lazy, iterations=1, known=Known(last, steps=[1e9]))
    assert again.last.uploads == 0, "nothing is news"


def test_an_iterator_may_be_left() -> None:
    problem = squares()
    how = Descent("lag-wk", problem.step)
    for one in lazy_gd_steps(problem.objectives, ZERO, how, iterations=1000):
        if one.number == 7:
            break
    assert one.number == 7
    assert one.gap is None


def test_autograd_gives_the_gradient() -> None:
    problem = squares()
    how = Descent("gd", problem.step)
    plain = lazy_gd(problem.objectives, ZERO, how, iterations=20)
    auto = lazy_gd([Objective(share.loss) for share in problem.shares], ZERO, how, iterations=20)
    assert torch.allclose(plain.theta, auto.theta, atol=1e-12)


def bad_squares() -> Problem:
    problem = squares(workers=3)
    broken = Squares(problem.shares[1].a, problem.shares[1].b.clone().fill_(math.inf))
    return Problem([problem.shares[0], broken, problem.shares[2]])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("by", ["loop", "lockstep"])
def test_a_gradient_that_is_not_finite_ends_the_run(algorithm: str, by: str) -> None:
    problem = bad_squares()
    how = Descent(algorithm, 0.01, smoothness=(1.0, 1.0, 1.0))
    with pytest.raises(ThinwireError, match=r"iteration 1: the gradient of (worker 1|another worker) is"):
        lazy_gd(problem.objectives, ZERO, how, iterations=5, by=by)


def test_and_does_so_on_every_rank() -> None:
    problem = bad_squares()
    how = Descent("lag-ps", 0.01, smoothness=(1.0, 1.0, 1.0))
    with pytest.raises(WorkerFailedError) as caught:
        lazy_gd(problem.objectives, ZERO, how, iterations=5, by="processes", timeout=400)
    for worker, who in ((0, "worker 1"), (1, "another worker"), (2, "another worker")):
        assert f"worker {worker}: " in str(caught.value)
        assert f"the gradient of {who} is not finite" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"algorithm": "sgd"}, "algorithm must be one of"),
        ({"step": 0.0}, "step must be a finite number above 0"),
        ({"xi": -1.0}, "xi must be a finite number from 0 up"),
        ({"bits": 9}, "bits must be one of"),
        ({"window": 0}, "window must be"),
        ({"algorithm": "lag-ps", "smoothness": (1.0,)}, "one number for each of 5 workers, not 1"),
        ({"algorithm": "lag-ps"}, "one number for each of 5 workers, not none"),
    ],
)
def test_bad_options_are_named(change: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        lazy_gd(
            squares().objectives, ZERO, Descent(**({"algorithm": "gd", "step": 0.1} | change)), iterations=3
        )


def test_bad_arguments_are_named() -> None:
    objectives, how = squares().objectives, Descent("gd", 0.1)
    with pytest.raises(ConfigError, match="no workers"):
        lazy_gd([], ZERO, how, iterations=3)
    with pytest.raises(ConfigError, match="flat tensor"):
        lazy_gd(objectives, torch.zeros(2, 3), how, iterations=3)
    with pytest.raises(ConfigError, match="give optimum"):
        lazy_gd(objectives, ZERO, how, iterations=3, gap=1e-3)
    with pytest.raises(ConfigError, match=r"known\.last needs one tensor for each of 5"):
        lazy_gd(objectives, ZERO, how, iterations=3, known=Known([ZERO]))
    with pytest.raises(ConfigError, match="can be pickled"):
        lazy_gd([Objective(lambda t: t.sum())] * 2, ZERO, how, iterations=3, by="processes")
    with pytest.raises(ConfigError, match="by must be one of"):
        lazy_gd(objectives, ZERO, how, iterations=3, by="mail")
