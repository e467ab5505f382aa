"""What reproductions compute from runs, on cases whose answer is known."""

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from reproductions import sparse
from reproductions.a2sgd import PUBLISHED, Watched
from reproductions.asylpg import published
from reproductions.asylpg_runs import ALGORITHMS, FULL, History
from reproductions.base import Claim, Outcome
from reproductions.cohort import Recipe
from reproductions.page import markdown
from reproductions.picture import MOST_POINTS, svg
from reproductions.pqasgd import COARSE, FINE, quantiser_loss, slope
from reproductions.scalecom import REPRODUCTION, hamming, similarity
from reproductions.sketched import recall
from thinwire.tools.report.figures import lines
from thinwire.tools.workloads.data import digits

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


def test_slope_of_a_power() -> None:
    assert slope([(x, 3 * x**-0.5) for x in (1.0, 10.0, 50.0)]) == pytest.approx(-0.5)


def test_quantisers_lose_what_is_said_of_them() -> None:
    assert quantiser_loss(FINE) < 1e-3
    assert 1 < quantiser_loss(COARSE) < 2


def test_bits_of_a_run() -> None:
    run = History([1.0, 0.5, 0.1], [0, 800, 2000], [0, 400, 800])
    assert run.bits_per_entry(10, 20) == [(4.0, 2.0), (6.0, 2.0)]
    assert run.bits_to(0.5) == 1200
    assert run.bits_to(0.01) is None
    assert all(published(label)[0] > 1 for label in ALGORITHMS if label != FULL)


def test_effects_are_differences_of_pairs() -> None:
    found = {
        cell: 0.5 + 0.1 * cell.feedback - 0.02 * cell.whole for cell in sparse.cells(momenta=(False, True))
    }
    effects = sparse._effects(found)
    for rule in sparse.RULES:
        assert effects["error feedback on"][rule] == pytest.approx([10.0] * 8)
        assert effects["layer by layer"][rule] == pytest.approx([2.0] * 8)
        assert effects["indices shared"][rule] == pytest.approx([0.0] * 8)
        assert effects["momentum after"][rule] == pytest.approx([0.0] * 8)


def test_random_blocks_cost_less_time_than_top_k() -> None:
    recipe = replace(RECIPE, hidden=(512, 512))
    block, top = (
        sparse.compression_time(f"{name}(ratio=0.05)", recipe, digits(), 10)
        for name in ("randomblock", "topk")
    )
    assert 0 < block < top


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
    assert svg("empty", lines({"none": ([], [])}, "x", "y")) is None
    flat = svg("flat", lines({"flat": ([1, 2], [3, 3])}, "x", "y", only_markers=True))
    assert flat is not None
    assert "L" not in "".join(p.get("d", "") for p in ElementTree.fromstring(flat).iter())


def test_bars_do_not_break_tables(tmp_path: Path) -> None:
    outcome = Outcome([Claim("|x| is small", "yes", "|x| = 0", True)])
    outcome.table("t", ("||g||", "n"), [("|1|", "2")])
    page = markdown({"scalecom": (REPRODUCTION, outcome)}, "made", {"scalecom": "page/scalecom.svg"})
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {6, 3}
    assert "(page/scalecom.svg)" in page
