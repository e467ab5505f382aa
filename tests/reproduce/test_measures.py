"""What reproductions compute from runs, on cases whose answer is known."""

import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from reproductions import (
    gaussiank,
    gaussiank_selection,
    gaussiank_shapes,
    growth,
    gspar,
    lag,
    pqasgd,
    pqasgd_optimizers,
    scale,
    seeds,
    sparse,
)
from reproductions.a2sgd import PUBLISHED, Silent, Watched
from reproductions.asylpg import savings
from reproductions.asylpg_runs import DOUBLE, FULL, GAPS, History, Runs
from reproductions.base import Claim, Outcome, exponent
from reproductions.cohort import Cohort, LocalCohort, Recipe, Training, by_groups, thinned, train
from reproductions.distributions_rates import Rate, powers
from reproductions.page import markdown
from reproductions.scalecom import REPRODUCTION, hamming, similarity
from reproductions.sketched import recall
from thinwire.tools.report.figure_picture import MOST_POINTS, svg
from thinwire.tools.report.figures import lines
from thinwire.tools.workloads import build
from thinwire.tools.workloads.data import digits
from thinwire.tools.workloads.models import loss

RECIPE = Recipe("mlp", workers=2, steps=20, batch=8, hidden=(32,), learning_rate=0.05)


def test_hamming_distance_of_the_largest_entries() -> None:
    a = torch.tensor([5.0, -4.0, 1.0, 0.5, 0.0, 0.0])
    b = torch.tensor([0.0, 4.0, 1.0, -9.0, 0.0, 0.0])
    assert hamming(a, a, 2) == 0
    assert hamming(a, b, 2) == 0.5
    assert hamming(a, torch.flip(a, (0,)), 2) == 1


def test_workers_with_the_same_batches_are_alike() -> None:
    found = similarity("scalecom(ratio=0.05)", RECIPE, digits())
    assert len(found.steps) == len(found.memories) == 19
    assert all(0 <= value <= 1 for value in found.workers + found.leader)
    alone = similarity("scalecom(ratio=0.05)", replace(RECIPE, batch=1437 * 8), digits())
    assert max(alone.memories) < 0.1 < min(found.gradients)


def test_a_large_table_finds_all_and_a_small_one_does_not() -> None:
    recipe = replace(RECIPE, hidden=(256,))
    large = recall("sketched(k=20, cols=40000, rows=5)", recipe, digits())
    small = recall("sketched(k=20, cols=64, rows=5)", recipe, digits())
    assert large.found > 0.95
    assert large.kept == pytest.approx(1, abs=0.02)
    assert small.found < 0.8 * large.found
    assert small.kept < large.kept


def test_two_means_leave_most_of_the_way_to_the_mean() -> None:
    left = {}
    for method in (PUBLISHED, "dense"):
        cohort = Watched(method, replace(RECIPE, dense_below=0), digits())
        for _ in range(3):
            cohort.step()
        left[method] = sum(cohort.left) / len(cohort.left)
    assert left["dense"] < 1e-5
    assert 0.7 < left[PUBLISHED] < 1.3


def test_the_exponent_of_a_power() -> None:
    assert exponent([(x, 3 * x**-0.5) for x in (1.0, 10.0, 50.0)]) == pytest.approx(-0.5)


def test_settings_are_on_the_side_of_the_conditions_that_they_show() -> None:
    """With the full run's workers and steps: all that is outside is far outside."""
    found = {str(one): one for one in pqasgd.settings(8, 1000)}
    outside = {name for name, one in found.items() if not one.inside}
    assert outside == {
        "spasgd(groups=512)",
        "spasgd(groups=512), sorted",
        "pqasgd(every=512, bits=8), sorted",
        pqasgd._quantised(pqasgd.WILD),
    }
    assert len(found) == 10
    assert 1 < found[pqasgd._quantised(pqasgd.FINE)].allowed < 1.001
    assert 2 < found[pqasgd._quantised(pqasgd.COARSE)].allowed < 3


@pytest.mark.parametrize("name", ["SGD", "momentum 0.9", "AdamW"])
def test_a_dense_run_is_that_of_torchs_own_optimizer(name: str) -> None:
    data, recipe = digits(), pqasgd_optimizers.recipes(Recipe("cnn", workers=2, steps=5, batch=8))[name]
    made = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum 0.9": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.001),
    }
    model = build("cnn", data, recipe.seed)
    optimizer = made[name](model.parameters())
    order = torch.Generator().manual_seed(1 + recipe.seed)
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        inputs, targets = data.batch(torch.randint(len(data.inputs), (2, 8), generator=order).flatten())
        loss(data, model(inputs), targets).backward()
        optimizer.step()
    cohort = Cohort("dense", recipe, data)
    assert list(cohort.run()) == [5]
    for mine, theirs in zip(cohort.models[0].parameters(), model.parameters(), strict=True):
        # AdamW divides by the root of tiny second moments, which shows the order of a sum.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-4 if name == "AdamW" else 1e-6)


def test_random_blocks_cost_less_time_than_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # other processes do not count
    recipe = replace(RECIPE, hidden=(512, 512))
    block, top = (
        sparse.compression_time(f"{name}(ratio=0.05)", recipe, digits(), 10)
        for name in ("randomblock", "topk")
    )
    assert 0 < block < top


def test_how_far_a_method_is_behind_another() -> None:
    dense, own = (
        [Training([], [(100, early), (2000, late + off)], 10.0, 0.0) for off in (-0.01, 0.0, 0.01)]
        for early, late in ((0.8, 0.95), (0.5, 0.94))
    )
    assert seeds.behind(own, dense) == pytest.approx(1.0)
    assert seeds.behind(own, dense, 0) == pytest.approx(30.0)
    assert seeds.accuracy(dense) == "95.00 ± 1.00 %"
    assert seeds.accuracy(dense[:1]) == "94.00 %"
    assert list(seeds.columns(dense)) == ["after 100 steps", "after 2,000 steps"]
    assert seeds.cells(dense) == ["80.00 ± 0.00 %", "95.00 ± 1.00 %"]
    assert growth.factor({16: 30, 4: 10, 64: 50}) == 5


def test_to_have_learned_is_to_be_twice_as_good_as_chance() -> None:
    data = digits()
    most = int(data.test_targets.bincount().max()) / len(data.test_targets)
    assert seeds.chance(data) == pytest.approx(most)
    below, above = ([Training([], [(9, 2 * most + off)], 0.0, 0.0)] for off in (-0.01, 0.01))
    assert seeds.has_learned(above, data)
    assert not seeds.has_learned(below, data)


def test_losses_are_thinned_to_means() -> None:
    assert thinned([1.0, 2.0, 3.0, 5.0, 9.0], points=2) == [(3, 2.0), (5, 7.0)]
    assert thinned([1.0, 2.0], points=40) == [(1, 1.0), (2, 2.0)]


def test_norms_of_groups_do_not_mix_images() -> None:
    model = build("resnet20", digits(), 0)
    by_groups(model)
    images = digits().inputs[:4]
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dense", "lost", "alone", "verdict"),
    [
        (0.5, 0.4, 3.0, "holds"),
        (0.5, 0.6, 3.0, "does not hold"),
        (0.5, 0.1, 0.3, "not judged"),
        (0.15, 0.4, 3.0, "not judged"),
    ],
)
def test_scale_is_judged_beside_a_worker_alone(dense: float, lost: float, alone: float, verdict: str) -> None:
    runs = {
        label: [Training([], [(10, dense - points / 100)], 0.0, 0.0)]
        for label, points in (("dense", 0.0), ("a worker alone", alone), ("16", lost), ("64", 0.0))
    }
    outcome = Outcome()
    scale.judge(outcome, digits(), "what", "paper", runs, ["16", "64"])
    assert [claim.verdict for claim in outcome.claims] == [verdict]


def test_powers_of_a_grid_are_found() -> None:
    rows = [
        Rate("x", k, n, b, k / (n * 2.0**b), k / (n * 2.0**b) ** 0.5)
        for k in (8, 16)
        for n in (32, 64)
        for b in (1, 2)
    ]
    assert powers(rows, "l2", bits_doubled=True) == pytest.approx((1, -1, -1))
    assert powers(rows, "l1", bits_doubled=True) == pytest.approx((1, -0.5, -0.5))


def test_thinned_traces_reach_the_gaps_at_the_same_bits() -> None:
    updates = list(range(0, 5001, 25))
    objective = [10.0 ** (-done / 500) for done in updates]
    whole = History(updates, objective, updates, updates, updates)
    thin = whole.thinned(0.0, 1000)
    assert len(thin.updates) < len(whole.updates) / 4
    for gap in GAPS:
        assert thin.bits_to(gap, 0.0) == pytest.approx(whole.bits_to(gap, 0.0))
    assert thin.bits_per_entry(3, 1000) == whole.bits_per_entry(3, 1000)


def test_training_with_a_schedule_ends_with_equal_replicas() -> None:
    found = {m: train(m, RECIPE, digits(), looks=2) for m in ("dense", "localsgd(every=4)")}
    assert [len(one.losses) for one in found.values()] == [20, 20]
    assert found["localsgd(every=4)"].payload == pytest.approx(found["dense"].payload / 4, rel=0.1)
    cohort = LocalCohort("localsgd(every=7)", RECIPE, digits())
    assert list(cohort.run(looks=4)) == [5, 10, 15, 20]
    pairs = list(zip(*(model.parameters() for model in cohort.models), strict=True))
    assert not all(torch.equal(*pair) for pair in pairs)
    cohort.sync()
    assert all(torch.equal(*pair) for pair in pairs)


def test_sorted_labels_give_each_worker_its_own() -> None:
    data = digits()
    cohort = LocalCohort("localsgd(every=4)", RECIPE, data, sorted_labels=True)
    everything = torch.arange(len(data.inputs))
    low, high = (set(data.targets[cohort._shard(rank, everything)].tolist()) for rank in (0, 1))
    assert max(low) <= min(high)
    assert low | high == set(range(10))


def test_workers_that_do_not_communicate_drift_apart() -> None:
    data = digits()
    silent, averaged = (Silent(RECIPE, data, every) for every in (None, 5))
    for cohort in (silent, averaged):
        assert list(cohort.run()) == [20]
    assert silent.spent().sent_bytes == 0 < averaged.spent().sent_bytes
    assert silent.spread() > averaged.spread() > 0


def test_gradients_of_convex_problems_are_those_of_autograd() -> None:
    rng = torch.Generator().manual_seed(3)
    x, theta = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((12, 5), (5,)))
    y = torch.sign(x[:, 0])
    theta.requires_grad_()
    for one in (lag.Squares(x, y), lag.Logistic(x, y)):
        (expected,) = torch.autograd.grad(one.loss(theta), theta)
        assert torch.allclose(one.gradient(theta.detach()), expected)
    problem = gspar.Logistic(gspar.Problem(rows=16, features=6))
    w, e = 0.1 * torch.randn(6, generator=rng), torch.eye(6) * 1e-2
    slope = torch.tensor([(problem.loss(w + step) - problem.loss(w - step)) / 2e-2 for step in e])
    assert torch.allclose(problem.gradient(w, torch.arange(16)), slope, atol=1e-3)


def test_the_optimum_of_the_synthetic_problem_is_one() -> None:
    problem = lag.increasing(3)
    runs = [lag.measure(lag.Task(lag.SYNTHETIC, 3), name, lag.PLAIN) for name in ("gd", "lag-wk")]
    for one in runs:
        assert min(gap for _, gap in one.curve) >= -1e-12
    assert runs[1].uploads < runs[0].uploads == 3 * runs[0].iterations
    assert all(a < b for a, b in itertools.pairwise(problem.smoothness))


def test_selections_find_the_largest_entries() -> None:
    rng = torch.Generator().manual_seed(5)
    u = torch.randn(200_000, generator=rng)
    k = 2000
    largest = set(u.abs().topk(k).indices.tolist())
    for select, least in (
        (gaussiank_selection.exact, 1.0),
        (gaussiank_selection.dgc_sampling, 0.7),
        (gaussiank_selection.redsync, 0.7),
        (gaussiank_selection.gaussian, 0.6),
    ):
        found = set(select(u, k).tolist())
        assert len(found) <= 2 * k
        assert len(found & largest) >= least * k, select
    assert set(gaussiank_selection.selection_times(1000, 1)) == set(gaussiank_selection.SELECTIONS)


def test_the_shape_of_gradients() -> None:
    rng = torch.Generator().manual_seed(6)
    bell = gaussiank_shapes.shape_of(torch.randn(100_000, generator=rng), 0.001, timed=True)
    assert bell.against == 0
    assert abs(bell.kurtosis) < 0.1
    assert bell.loss.worst < 1
    assert max(bell.fits, key=lambda fit: fit.log_likelihood).family != "Laplace"
    assert all(0.6 < count < 1.4 for count in bell.counts.values())
    assert set(bell.seconds) == {"copy", *gaussiank_selection.SELECTIONS}
    sides = torch.where(torch.rand(100_000, generator=rng) > 0.5, 2.0, -2.0)
    two_peaks = torch.randn(100_000, generator=rng) + sides
    assert gaussiank_shapes.shape_of(two_peaks, 0.001).against > 0.05
    heavy = gaussiank_shapes.shape_of(torch.randn(100_000, generator=rng) ** 3, 0.001)
    assert heavy.counts["first threshold"] > 2
    assert 2 / 3 <= heavy.counts["thinwire"] <= 4 / 3


@pytest.mark.parametrize(
    ("dense", "lone", "own", "verdict"),
    [
        (0.95, 0.90, 0.945, "holds"),
        (0.95, 0.90, 0.93, "does not hold"),
        (0.95, 0.943, 0.942, "does not hold"),  # no better than not to communicate
        (0.95, 0.949, 0.945, "not judged"),
        (0.19, 0.13, 0.185, "not judged"),  # none has learned
    ],
)
def test_near_dense_is_judged_beside_a_lone_worker(
    dense: float, lone: float, own: float, verdict: str
) -> None:
    accuracies = {"dense": dense, gaussiank.LONE: lone, "topk": own + 0.002, "gaussiank": own}
    runs = {name: [Training([], [(10, value)], 0.0, 0.0)] for name, value in accuracies.items()}
    outcome = Outcome()
    gaussiank._accuracy(outcome, "MLP", RECIPE, digits(), runs)
    assert [claim.verdict for claim in outcome.claims] == ["holds" if own > 0.2 else "not judged", verdict]


def test_runs_with_the_same_product_are_averaged() -> None:
    squares = {(1, 20): 4.0, (2, 10): 9.0, (2, 20): 1.0}
    products, means = pqasgd._by_product(squares)
    assert products == [20, 40]
    assert means == pytest.approx([6.0, 1.0])


def test_savings_are_those_of_full_precision_over_an_algorithm() -> None:
    full, own = (History([0, 100], [1.0, 1e-4], [0, 90 * n], [0, 10 * n]) for n in (6, 2))
    runs = Runs("x", 10, 5, {FULL: full, DOUBLE: own})
    reached = [gap >= 1e-4 for gap in GAPS]
    assert savings(runs, DOUBLE) == [pytest.approx(3.0) if each else None for each in reached]
    assert 1 < sum(reached) < len(GAPS)


def test_pictures_are_svg_with_a_legend_and_few_points() -> None:
    xs = range(1, 5001)
    curves = {"first & last": (xs, [math.sqrt(x) for x in xs]), "second": ((1, 10, 100), (0.0, 2.0, 3.0))}
    text = svg("a < b", lines(curves, "x", "y", log_x=True, log_y=True))
    assert text is not None
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"A < b", "x", "y", "first & last", "second"} <= set(words)
    paths = [element.get("d", "") for element in root.iter() if element.tag.endswith("path")]
    assert max(path.count("L") for path in paths) < MOST_POINTS
    steep = lines({"steep": ((1, 2, 3), (1.0, 1e-3, 1e-300))}, "x", "y", log_y=True)
    steep["layout"]["yaxis"]["range"] = [-4, 1]  # exponents, as Plotly has them
    assert "1e-300" not in (cut := svg("cut", steep) or "")
    assert "0.001" in cut
    assert svg("empty", lines({"none": ([], [])}, "x", "y")) is None
    flat = svg("flat", lines({"flat": ([1, 2], [3, 3])}, "x", "y", only_markers=True))
    assert flat is not None
    assert "L" not in "".join(p.get("d", "") for p in ElementTree.fromstring(flat).iter())


def test_bars_do_not_break_tables(tmp_path: Path) -> None:
    outcome = Outcome([Claim("|x| is small", "yes", "|x| = 0", True)])
    outcome.table("t", ("||g||", "n"), [("|1|", "2")])
    page = markdown({"scalecom": (REPRODUCTION, outcome)}, "made", {"scalecom": "page/scalecom.svg"})
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {7, 6, 3}  # the summary, the claims, the table
    assert "(page/scalecom.svg)" in page
