"""LAG and its relatives in sessions: what is sent, what is kept, and when nothing is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.laws.cohort import SHAPES, Cohort, same_bits
from tests.laws.test_laws import Quadratic
from thinwire import ConfigError, PayloadError, Session
from thinwire.core import Exchange
from thinwire.drivers import Lockstep
from thinwire.methods import LAG, LAQ, LASG, SLAQ
from thinwire.methods.families import lazy_rules as rules
from thinwire.methods.families.lazy import Coder, Counts, LazyState, Upload
from thinwire.net import costs
from thinwire.net.rank_info import RankInfo

# Within what theory asks for: window * xi well below 1, steps shorter for it.
SOUND = (
    LAG(xi=0.02),
    LAG(rule="ps", xi=0.02),
    LAQ(bits=4, xi=0.02),
    LAQ(bits=8, xi=0.02, max_skip=3),
    SLAQ(bits=4, xi=0.02, allowance=0.01),
    LASG(bits=4),
)


def states(cohort: Cohort) -> list[LazyState]:
    return [next(iter(session.engine.states._live.values())).state for session in cohort.sessions]


def descend(cohort: Cohort, steps: int, rate: float = 0.3) -> tuple[torch.Tensor, Quadratic]:
    """Gradient descent on ranks whose minima lie far apart, with a check of the sum at every step."""
    problem, x = Quadratic(len(cohort.sessions)), torch.zeros(20, 30)
    for _ in range(steps):
        outputs = cohort.average(problem.gradients(x))
        kept = states(cohort)
        total = sum(state.last for state in kept)
        for state, output in zip(kept, outputs, strict=True):
            assert same_bits(state.total, kept[0].total)
            # A mean is made in float32, and so exact to the last digits of what is averaged.
            assert (state.total - total).abs().max() <= 1e-6 * sum(one.last.abs() for one in kept).max()
            assert same_bits(output["wide"].view(-1), (state.total / len(kept)).float())
        x = x - rate * outputs[0]["wide"]
    return x, problem


@pytest.mark.parametrize("method", SOUND, ids=str)
@pytest.mark.parametrize("size", [1, 4])
def test_the_sum_is_that_of_the_last_uploads_at_every_step_and_leads_to_the_minimum(
    method: Exchange, size: int
) -> None:
    cohort = Cohort(method, size, {"wide": (20, 30)})
    x, problem = descend(cohort, 60)
    assert (x - problem.best).norm() < 0.02 * problem.best.norm()
    if not isinstance(method, LASG):  # which has nothing to compare here
        assert any(Counts.of(state.counts).uploads < 60 for state in states(cohort))


@pytest.mark.parametrize("method", [LAG(xi=1.0), LAQ(bits=1, xi=0.5), SLAQ(bits=2, allowance=50.0)], ids=str)
def test_the_sum_is_right_whatever_is_skipped(method: Exchange) -> None:
    descend(Cohort(method, 3, {"wide": (20, 30)}), 20, rate=0.05)


def test_the_sum_does_not_drift() -> None:
    """Nothing but broadcasts: differences on top of differences, on numbers around 100."""
    cohort = Cohort(LAQ(bits=4, xi=0.5, max_skip=2), 3, {"wide": (7, 9)})
    rng = torch.Generator().manual_seed(0)
    for _ in range(200):
        cohort.average([{"wide": torch.randn(7, 9, generator=rng) * 100} for _ in range(3)])
    kept = states(cohort)
    assert "all_reduce" not in cohort.driver.meters[0].by_operation
    assert (kept[0].total - sum(state.last for state in kept)).abs().max() < 1e-10


@pytest.mark.parametrize("size", [1, 2, 5])
def test_xi_0_is_the_dense_mean_bit_for_bit(size: int) -> None:
    lazy, dense = Cohort(LAG(xi=0.0), size), Cohort("dense", size)
    for step in range(4):
        inputs = lazy.inputs(step // 2)  # the same gradients twice: even no difference is uploaded
        for mine, plain in zip(lazy.average(inputs), dense.average(inputs), strict=True):
            assert all(same_bits(mine[name], plain[name]) for name in SHAPES)


def test_laq_with_32_bits_is_lag() -> None:
    lag = Cohort(LAG(xi=0.3, window=4), 4, {"wide": (20, 30)})
    laq = Cohort(LAQ(bits=32, xi=0.3, window=4, max_skip=10_000), 4, {"wide": (20, 30)})
    problem, x, skipped = Quadratic(4), torch.zeros(20, 30), 0
    for _ in range(40):
        (output, *_), (other, *_) = (cohort.average(problem.gradients(x)) for cohort in (lag, laq))
        assert same_bits(output["wide"], other["wide"])
        skipped += sum(Counts.of(state.counts).silence > 0 for state in states(laq))
        x = x - 0.3 * output["wide"]
    assert skipped > 20


@pytest.mark.parametrize("limit", [0, 2, 5])
@pytest.mark.parametrize("cls", [LAQ, SLAQ])
def test_nobody_is_silent_for_longer_than_max_skip(cls: type, limit: int) -> None:
    cohort = Cohort(cls(xi=1e6, max_skip=limit), 3)
    longest = 0
    for step in range(15):
        cohort.average(cohort.inputs(step))
        longest = max(longest, *(Counts.of(state.counts).silence for state in states(cohort)))
    assert longest == limit


def test_nothing_but_flags_travels_when_nobody_uploads() -> None:
    cohort = Cohort(LAG(xi=1e9), 4)
    cohort.average(cohort.inputs(0))
    before = [meter.total for meter in cohort.driver.meters]
    first = cohort.average(cohort.inputs(0))
    second = cohort.average(cohort.inputs(1))
    assert all(same_bits(first[0][name], second[0][name]) for name in SHAPES)
    for meter, old in zip(cohort.driver.meters, before, strict=True):
        since = meter.total.minus(old)
        assert (since.operations, since.payload_bytes) == (2, 2), "one byte a rank and step"


def uploads_of(news: list[int], size: int, method: Exchange) -> tuple[dict[str, int], Cohort, list]:
    """One step in which only these ranks have news; the operations it took."""
    cohort = Cohort(method, size)
    start = cohort.inputs(0)
    cohort.average(start)
    before = dict(cohort.driver.meters[0].by_operation)
    inputs = [
        {name: 1000 * t + 1000 if rank in news else t for name, t in one.items()}
        for rank, one in enumerate(start)
    ]
    outputs = cohort.average(inputs)
    after = cohort.driver.meters[0].by_operation
    counted = {
        name: tally.operations - (before[name].operations if name in before else 0)
        for name, tally in after.items()
    }
    truth = {name: sum(one[name].double() for one in inputs) / size for name in SHAPES}
    error = max(float((outputs[0][name] - truth[name]).abs().max()) for name in SHAPES)
    return {name: n for name, n in counted.items() if n}, cohort, [error, outputs]


@pytest.mark.parametrize(
    ("size", "news", "operations"),
    [
        (4, [], {"all_gather": 1}),
        (4, [2], {"all_gather": 1, "broadcast": 1}),
        (5, [1, 3], {"all_gather": 1, "all_to_all": 1, "broadcast": 1}),
        (5, [0, 1, 2, 4], {"all_gather": 1, "all_reduce": 1}),
        (5, [0, 1, 2, 3, 4], {"all_gather": 1, "all_reduce": 1}),
    ],
)
def test_how_uploads_travel_follows_from_the_flags(size: int, news: list[int], operations: dict) -> None:
    counted, cohort, (error, outputs) = uploads_of(news, size, LAG(xi=1.0))
    assert counted == operations
    assert error < 0.05, "a mean of numbers up to a hundred thousand"
    for rank, state in enumerate(states(cohort)):
        assert (Counts.of(state.counts).silence == 0) == (rank in news)
    assert all(same_bits(outputs[0][name], other[name]) for other in outputs for name in SHAPES)


@given(st.integers(0, 64), st.integers(1, 64), st.integers(1, 10**7), st.sampled_from([1, 2, 4, 8, 32]))
def test_the_plan_is_the_cheapest_for_the_busiest_receiver(u: int, size: int, n: int, bits: int) -> None:
    u, coded = min(u, size), Coder(bits).payload_bytes(n)
    received = {
        "nothing": 0 if u == 0 else float("inf"),
        "broadcast": u * coded,
        "star": max((u - 1) * coded, 4 * n),
        "mean": costs.all_reduce(size, 4 * n).received,
    }
    chosen = costs.cheapest_upload(u, size, coded, 4 * n, 4 * n)
    assert received[chosen] == min(received.values())
    if u == size:
        assert bits < 32 or chosen == "mean", "all upload, uncoded: the dense mean itself"


@st.composite
def differences(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """A gradient, the last upload, and the lengths of tensors that have changed by very different amounts."""
    lengths = tuple(draw(st.lists(st.integers(1, 200), min_size=1, max_size=6)))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    last = torch.randn(sum(lengths), generator=rng, dtype=torch.float64)
    scales = draw(st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1e6]), min_size=6, max_size=6))
    pieces = [torch.randn(n, generator=rng, dtype=torch.float64) for n in lengths]
    change = torch.cat([scale * piece for scale, piece in zip(scales, pieces, strict=False)])
    return last + change, last, lengths


@given(differences(), st.sampled_from([1, 2, 4, 8]))
def test_every_entry_is_within_its_own_tensor_s_error_bound(given_, bits: int) -> None:
    x, last, lengths = given_
    coder = Coder(bits, lengths)
    upload = coder.encode(x, last)
    decoded = coder.decode(upload.parts, len(x))
    difference = (x - last).float()
    for theirs, mine in zip(decoded.split(lengths), difference.split(lengths), strict=True):
        radius = float(mine.abs().max())
        # The radius is not on a float32 grid of its own: a few roundings of it come on top.
        assert (
            float((theirs.double() - mine).abs().max()) <= radius / (2**bits - 1) * (1 + 1e-5) + 1e-6 * radius
        )
        if radius == 0:
            assert not theirs.any(), "what has not changed is decoded as nothing"
    lost = float((decoded.double() - difference.double()).square().sum())
    assert upload.error == pytest.approx(lost, rel=1e-3, abs=1e-30)
    assert upload.size == pytest.approx(float(decoded.double().square().sum()), rel=1e-5)
    assert same_bits(coder.decode(upload.parts, len(x)), decoded), "whoever decodes it"
    assert sum(part.nbytes for part in upload.parts) == coder.payload_bytes(len(x))
    blanks = coder.blanks(len(x), x.device)
    assert [(b.shape, b.dtype) for b in blanks] == [(p.shape, p.dtype) for p in upload.parts]


def excused(upload: Upload, weight: float) -> float:
    """The change that the errors of its codes alone allow to skip."""
    return rules.allow_code_errors(0.0, upload.error, upload.error, weight)


def test_a_tensor_with_large_entries_does_not_drown_the_others() -> None:
    """With one radius the codes of small entries lose more than these are, and the rule skips all of it."""
    rng = torch.Generator().manual_seed(0)
    large, small = torch.randn(100, generator=rng), 0.01 * torch.randn(10_000, generator=rng)
    x, nothing = torch.cat([large, small]), torch.zeros(10_100, dtype=torch.float64)
    one, each = Coder(4).encode(x, nothing), Coder(4, (100, 10_000)).encode(x, nothing)
    size = float(x.double().square().sum())
    assert one.size < excused(one, rules.SLAQ_ERROR_WEIGHT), "skipped, although everything has changed"
    assert each.size > 10 * excused(each, rules.SLAQ_ERROR_WEIGHT)
    assert one.error > size
    assert each.error < 0.02 * size


def test_codes_too_coarse_for_the_rule_are_warned_of() -> None:
    """They lose so much of any change that the rule always has an excuse, until `max_skip` ends it."""
    # Laplace's distribution, with longer tails than the normal one: as gradients have them.
    even = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) - 0.5
    change = -even.sign() * (1 - 2 * even.abs()).log()
    for bits in range(1, 9):
        upload = Coder(bits).encode(change, torch.zeros(10_000))
        weights = {LAQ: rules.LAQ_ERROR_WEIGHT, SLAQ: rules.SLAQ_ERROR_WEIGHT}
        for cls, enough in ((LAQ, 4), (SLAQ, 3)):
            skips = upload.size <= excused(upload, weights[cls])
            assert skips == (bits < enough), "everything has changed"
            assert bool(cls(bits=bits).warning) == skips
    assert SLAQ(bits=1, max_skip=0).warning is None
    uneven = Coder(4).encode(change**3, torch.zeros(10_000))
    assert uneven.size < excused(uneven, rules.SLAQ_ERROR_WEIGHT), "4 bits do not suffice for every tensor"


def test_slaq_measures_the_noise_and_skips_what_it_explains() -> None:
    """Gradients that only fluctuate around a fixed one are uploaded rarely; one that moves away, at once."""
    method, rng = SLAQ(bits=8, xi=0.0), torch.Generator().manual_seed(0)
    cohort = Cohort(method, 2, {"w": (20_000,)})
    fixed = torch.randn(20_000, generator=rng)

    def uploads() -> list[int]:
        states = [session.engine.states.entries() for session in cohort.sessions]
        return [Counts.of(one["counts"]).uploads for own in states for one in own.values()]

    def step(shift: float) -> None:
        noise = [0.1 * torch.randn(20_000, generator=rng) for _ in range(2)]
        cohort.average([{"w": fixed + shift + each} for each in noise])

    for _ in range(60):
        step(0.0)
    assert max(uploads()) <= 4
    before = uploads()
    step(1.0)
    assert [after - then for after, then in zip(uploads(), before, strict=True)] == [1, 1]
    (counts,) = [one["counts"] for one in cohort.sessions[0].engine.states.entries().values()]
    assert Counts.of(counts).noise > 0.5 * 2 * 20_000 * 0.01


@pytest.mark.parametrize("bits", [3, 5, 7])
def test_every_width_sends_its_bits(bits: int) -> None:
    cohort = Cohort(LAQ(bits=bits, max_skip=0), 2, {"w": (1000,)})
    cohort.average([{"w": torch.randn(1000)} for _ in range(2)])
    assert cohort.sessions[0].payload_bytes() == 1 + 125 * bits + 4


# -- steps without a gradient ------------------------------------------------------------------------------


def test_xi_of_the_paper_is_the_default() -> None:
    assert LAG().weight == 0.1
    assert LAG(rule="ps").weight == 1.0
    assert LAG(rule="ps", xi=0.5).weight == 0.5


def test_a_rank_that_is_not_asked_computes_nothing_and_the_result_is_the_same() -> None:
    """Both ranks skip most gradients of a quadratic; the parameters are those of computing all of them."""
    centre, curve = torch.tensor([[1.0], [-2.0]]), torch.tensor([0.01, 1.0])

    def run(ask: bool) -> tuple[torch.Tensor, list[int]]:
        parameters = [torch.zeros(1, requires_grad=True) for _ in range(2)]
        optimizers = [torch.optim.SGD([p], lr=0.3) for p in parameters]
        driver = Lockstep(2)
        sessions = [
            Session([("w", p)], LAG(rule="ps"), rank_info=info, optimizer=optimizer)
            for p, info, optimizer in zip(parameters, driver.rank_infos, optimizers, strict=True)
        ]
        computed = [0, 0]
        for _ in range(30):
            views = []
            for rank, (session, p) in enumerate(zip(sessions, parameters, strict=True)):
                wanted = session.wants_gradient()
                computed[rank] += wanted
                session.engine.begin_step()
                if wanted or not ask:
                    gradient = curve[rank] * (p.detach() - centre[rank])
                    views.append(session.engine.views({"w": gradient}, in_place=True)[1])
                else:
                    views.append(session.engine.views_without_gradient())
            programs = [s.engine.program(v) for s, v in zip(sessions, views, strict=True)]
            driver.run(programs)
            for session, p, optimizer, view in zip(sessions, parameters, optimizers, views, strict=True):
                session.engine.end_step(True)
                p.grad = view[0].out.clone()
                optimizer.step()
        assert same_bits(parameters[0], parameters[1])
        return parameters[0].detach(), computed

    (lazy, asked), (plain, _) = run(True), run(False)
    assert same_bits(lazy, plain)
    assert 2 <= min(asked) <= max(asked) < 15, "of 30 gradients each"


def test_a_gradient_that_is_needed_cannot_be_skipped() -> None:
    session = Session([("w", torch.zeros(3))], "topk", rank_info=RankInfo(0, 1))
    assert session.wants_gradient()
    with pytest.raises(ConfigError, match="must compute its gradient"):
        session.skip_gradient()


@pytest.mark.parametrize("radius", [-1.0, float("nan"), float("inf")])
def test_a_received_radius_must_be_finite_and_not_negative(radius: float) -> None:
    coder = Coder(4, (5, 6))
    packed, radii = coder.encode(torch.arange(11.0), torch.zeros(11)).parts
    radii[1] = radius
    with pytest.raises(PayloadError, match="finite and not negative"):
        coder.decode([packed, radii], 11)


def test_an_upload_of_another_length_is_refused() -> None:
    coder = Coder(4, (5, 6))
    packed, radii = coder.encode(torch.arange(11.0), torch.zeros(11)).parts
    assert (len(packed), len(radii)) == (3 + 3, 2), "a tensor's codes begin with a byte of their own"
    for parts in ([packed[:-1], radii], [packed, radii[:1]], [packed, torch.zeros(3)]):
        with pytest.raises(PayloadError, match="an upload of 2 tensors has 6 bytes of codes"):
            coder.decode(parts, 11)


@pytest.mark.parametrize("text", ["laq(bits=4)", "slaq(bits=8)", "lasg(bits=2)", "laq(bits=1)"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_model_of_several_tensors_costs_what_is_promised(text: str, size: int) -> None:
    """A flag, every tensor's codes from a whole byte on, and a radius each; an empty tensor has none."""
    cohort = Cohort(text, size, {"a": (7, 9), "empty": (0, 3), "b": (5,), "c": (1,)})
    outputs = cohort.average(cohort.inputs(0))
    bits = cohort.sessions[0].method.upload_bits
    expected = 1 + sum(-(-n * bits // 8) + 4 for n in (63, 5, 1))
    assert cohort.sessions[0].payload_bytes() == expected
    assert {meter.payload_bytes for meter in cohort.driver.meters} == {expected}
    assert all(same_bits(outputs[0][name], other[name]) for other in outputs for name in outputs[0])


def test_a_tensor_without_gradients_stays_without() -> None:
    """One radius for all would have moved it: 0 is on no grid but that of the radius 0."""
    cohort = Cohort("laq", 3, {"used": (30, 40), "unused": (50,)})
    for step in range(4):
        inputs = [one | {"unused": torch.zeros(50)} for one in cohort.inputs(step)]
        for output in cohort.average(inputs):
            assert output["used"].any()
            assert not output["unused"].any()


def test_a_changed_learning_rate_is_taken_into_account() -> None:
    """R_k measures past steps by the present rate: at a tenth of it they weigh a hundred times as much."""

    def uploads(rate: float) -> int:
        driver = Cohort("dense", 3).driver
        parameter = torch.zeros(40, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        sessions = [
            Session([("p", parameter)], LAG(xi=0.05), rank_info=RankInfo(rank, 3), optimizer=optimizer)
            for rank in range(3)
        ]
        rng = torch.Generator().manual_seed(0)
        base = torch.randn(40, generator=rng)
        for step in range(8):
            if step == 6:
                optimizer.param_groups[0]["lr"] = rate
            programs = []
            for session in sessions:
                session.engine.begin_step()
                _, views = session.engine.views({"p": base + 0.9 * torch.randn(40, generator=rng)})
                programs.append(session.engine.program(views))
            kept = driver.run(programs)
            for session in sessions:
                session.engine.end_step(kept)
        return sum(
            Counts.of(next(iter(session.engine.states._live.values())).state.counts).silence == 0
            for session in sessions
        )

    assert uploads(1.0) == 3
    assert uploads(0.1) == 0


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "plain", "groups"])
def test_an_optimizer_whose_steps_are_others_is_warned_of(optimizer: str, caplog) -> None:
    a, b = torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    made = {
        "momentum": lambda: torch.optim.SGD([a, b], lr=0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam([a, b]),
        "plain": lambda: torch.optim.SGD([a, b], lr=0.1),
        "groups": lambda: torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}]),
    }[optimizer]()
    Session([("a", a), ("b", b)], "lag", rank_info=RankInfo(0, 1), optimizer=made)
    said = {"plain": "", "groups": "has several"}.get(optimizer, "its guarantees do not hold")
    assert bool(caplog.text) == bool(said)
    assert said in caplog.text


def test_small_tensors_are_skipped_with_the_rest() -> None:
    cohort = Cohort(LAG(xi=1e9), 3, {"weight": (40, 50), "bias": (50,)}, dense_below=1024)
    for step in range(3):
        cohort.average(cohort.inputs(step))
    assert cohort.driver.meters[0].payload_bytes == 4 * 2050 + 3


def test_another_number_of_ranks_begins_anew() -> None:
    old = Cohort(LAQ(), 4)
    for step in range(5):
        old.average(old.inputs(step))
    saved = [session.sealed() for session in old.sessions]
    for how, given_to in (("sum", [saved[:2], saved[2:]]), ("drop", [saved[0], saved[3]])):
        new, fresh = Cohort(LAQ(), 2), Cohort(LAQ(), 2)
        for session, state in zip(new.sessions, given_to, strict=True):
            session.load_state_dict(state, on_resize=how)
        inputs = new.inputs(9)
        for mine, other in zip(new.average(inputs), fresh.average(inputs), strict=True):
            assert all(same_bits(mine[name], other[name]) for name in SHAPES)


class Scale:
    def __init__(self) -> None:
        self.value = 1.0

    def get_scale(self) -> float:
        return self.value


@pytest.mark.parametrize("method", [LAG(xi=0.3), LAG(rule="ps", xi=1.0), LAQ(), SLAQ(allowance=1.0)], ids=str)
def test_what_is_kept_follows_the_loss_scale(method: Exchange) -> None:
    def outputs(scales: list[float]) -> list[torch.Tensor]:
        cohort, scale, found = Cohort(method, 3, {"wide": (20, 30)}), Scale(), []
        for session in cohort.sessions:
            session.engine._scaler = scale
        problem, x = Quadratic(3), torch.zeros(20, 30)
        for value in scales:
            scale.value = value
            given = [{"wide": one["wide"] * value} for one in problem.gradients(x)]
            found.append(cohort.average(given)[0]["wide"] / value)
            x = x - 0.3 * found[-1]
        return [*found, torch.tensor([float(Counts.of(state.counts).uploads) for state in states(cohort)])]

    plain, scaled = outputs([1.0] * 20), outputs([1.0] * 5 + [1024.0] * 7 + [256.0] * 8)
    assert torch.equal(plain[-1], scaled[-1]), "the same uploads"
    for a, b in zip(plain, scaled, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lag(rule='both')", "rule must be one of 'wk', 'ps'"),
        ("lag(window=0)", "window must be a whole number from 1 up"),
        ("lag(xi=-0.1)", "xi must be a finite number from 0 up"),
        ("laq(bits=9)", "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8, 32"),
        ("laq(max_skip=-1)", "max_skip must be a whole number from 0 up"),
        ("slaq(allowance='much')", "allowance must be a finite number"),
        ("lasg(bits=9)", "bits must be one of"),
    ],
)
def test_bad_options_are_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Session([("p", torch.zeros(3))], text, rank_info=RankInfo(0, 1))
