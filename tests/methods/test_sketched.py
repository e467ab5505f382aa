"""Sketched-SGD: linearity, conservation, recall, no dependence on the number of workers."""

import pytest
import torch

from tests.laws.cohort import Cohort, total
from thinwire import kernels
from thinwire.methods import HeavyBall, Sketched

SHAPES = {"a": (40, 50), "b": (30, 20)}


def sketch(x: torch.Tensor, cols: int, seed: int = 7) -> torch.Tensor:
    table = torch.zeros(5, cols)
    kernels.sketch_insert(x, 5, cols, seed, table)
    return table


def test_the_mean_of_sketches_is_the_sketch_of_the_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(4, 5000, generator=rng)
    mean = sum(sketch(one, 200) for one in x) / 4
    assert torch.allclose(mean, sketch(x.mean(0), 200), atol=1e-4)


def test_recall_of_planted_hitters() -> None:
    """d = 200,000, 200 hitters, 8 workers: all are among 4 k candidates with 10 k columns."""
    d, k, workers = 200_000, 200, 8
    rng = torch.Generator().manual_seed(1)
    planted = torch.randperm(d, generator=rng)[:k].sort().values
    x = torch.randn(workers, d, generator=rng) * 0.2
    x[:, planted] += 10 * torch.randint(0, 2, (k,), generator=rng).mul(2).sub(1)
    table = sum(sketch(one, 10 * k) for one in x) / workers
    recall = {
        candidates: torch.isin(planted, kernels.sketch_query_topk(table, d, 7, candidates * k).long())
        for candidates in (1, 4)
    }
    assert recall[4].float().mean() >= 0.99
    assert recall[1].float().mean() < 0.95, "this is what the candidates are for"


def test_conservation_coordinate_by_coordinate() -> None:
    cohort = Cohort(Sketched(ratio=0.01, momentum=0.0), 3, SHAPES)
    for step in range(5):
        inputs, before = cohort.inputs(step), cohort.residuals()
        outputs = cohort.average(inputs)
        after, given = cohort.residuals(), total(inputs)
        for name in SHAPES:
            arrived = 3 * outputs[0][name].double() + after[name]
            assert torch.allclose(arrived, before[name] + given[name], atol=1e-4)


def test_k_entries_are_sent_and_forgotten() -> None:
    method = Sketched(k=20, cols=100)
    cohort = Cohort(method, 3, SHAPES)
    for step in range(4):
        (output, *_) = cohort.average(cohort.inputs(step))
        flat = torch.cat([output[name].view(-1) for name in SHAPES])
        assert flat.count_nonzero() == 20, "selected in the whole model"
        entries = cohort.sessions[0].engine.states.entries()
        for field in ("u", "v"):
            kept = torch.cat([entries[name][field] for name in SHAPES])
            assert not kept[flat != 0].any()


def test_one_worker_equals_four_on_the_same_batch() -> None:
    one, four = (Cohort(Sketched(ratio=0.02, cols=100), size, SHAPES) for size in (1, 4))
    for step in range(5):
        parts = four.inputs(step)
        whole = [{name: sum(part[name] for part in parts) / 4 for name in SHAPES}]
        (expected,), (output, *_) = one.average(whole), four.average(parts)
        for name in SHAPES:
            assert torch.allclose(output[name], expected[name], atol=1e-4)


def test_candidates_are_told_apart_by_their_exact_values() -> None:
    """Two blocks share 64 columns, so every entry has a ghost; fetched, it turns out to be nothing."""
    cohort = Cohort(Sketched(k=5, cols=64, rows=1, candidates=2), 2, {"a": (8, 16)})
    inputs = [{"a": torch.zeros(8, 16)} for _ in range(2)]
    hitters = torch.tensor([3, 20, 33, 47, 60])
    for rank, one in enumerate(inputs):
        one["a"].view(-1)[hitters] = torch.tensor([5.0, -4.0, 3.0, -2.0, 1.0]) * (rank + 1)
    (output, _) = cohort.average(inputs)
    assert torch.allclose(output["a"].view(-1)[hitters], torch.tensor([7.5, -6.0, 4.5, -3.0, 1.5]))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_vector_that_is_not_worth_a_sketch_is_averaged_with_plain_momentum(momentum: float) -> None:
    cohort, plain = Cohort(Sketched(ratio=0.5, momentum=momentum), 3), Cohort(HeavyBall(momentum), 3)
    for step in range(4):
        inputs = cohort.inputs(step)
        (output, *_), (expected, *_) = cohort.average(inputs), plain.average(inputs)
        for name, tensor in expected.items():
            assert torch.allclose(output[name], tensor, atol=1e-5)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_half_precision_halves_the_bytes_and_finds_the_same_entries(wire: str) -> None:
    rng = torch.Generator().manual_seed(0)
    gradients = [{"w": 0.01 * torch.randn(100, 200, generator=rng)} for _ in range(2)]
    for each in gradients:
        each["w"].view(-1)[::400] = 5.0  # 50 entries that stand out
    options = "ratio=0.0025, cols=2000, momentum=0.0"
    wide = Cohort(f"sketched({options})", 2, {"w": (100, 200)})
    narrow = Cohort(f"sketched({options}, wire={wire!r})", 2, {"w": (100, 200)})
    a, b = wide.average(gradients)[0]["w"], narrow.average(gradients)[0]["w"]
    assert torch.equal(a.nonzero(), b.nonzero())
    assert torch.allclose(a, b, rtol=0.01)
    full, half = (each.sessions[0].payload_bytes() for each in (wide, narrow))
    assert full == 2 * half


def test_one_round_takes_the_estimates_of_the_sketch() -> None:
    cohort = Cohort("sketched(ratio=0.0025, cols=4000, momentum=0.0, candidates=0)", 2, {"w": (100, 200)})
    gradient = torch.zeros(100, 200)
    gradient.view(-1)[::400] = torch.arange(1.0, 51.0)
    out = cohort.average([{"w": gradient}, {"w": gradient}])[0]["w"]
    assert torch.allclose(out, gradient, rtol=1e-5)
    assert cohort.driver.meters[0].rounds == 1
