"""The laws that every registered method obeys, by its traits. `-m quick`: one pass over all methods."""

import copy
import itertools
import json
import math
import re
from collections.abc import Iterable

import torch

from tests.laws.cohort import (
    CONFIGURATIONS,
    DEFAULTS,
    LATE,
    LINKS,
    PROMPT,
    SHAPES,
    SIZES,
    SLOW_CONVERGENCE,
    Cohort,
    every,
    memory,
    named,
    same_bits,
    same_state,
    second_of_a_kind,
    total,
)
from thinwire import parse
from thinwire.methods.registry import to_json
from thinwire.net.link import slowest_link


@every(size=SIZES)
def test_symmetry_and_consensus(method: str, size: int) -> None:
    """All ranks issue the same operations (lock-step fails otherwise) and get equal bits."""
    cohort = Cohort(method, size)
    for step in range(3):
        outputs = cohort.average(cohort.inputs(step))
        if parse(method).traits.consensus:
            for name in SHAPES:
                assert all(same_bits(outputs[0][name], other[name]) for other in outputs), name


@every(named(lambda traits: traits.conserves), size=SIZES)
def test_conservation(method: str, size: int) -> None:
    """Sum of inputs + old errors = size x output + new errors: nothing is lost."""
    cohort = Cohort(method, size)
    for step in range(5):
        before, inputs = cohort.residuals(), cohort.inputs(step)
        outputs, given = cohort.average(inputs), total(inputs)
        after = cohort.residuals()
        for name in SHAPES:
            arrived = size * outputs[0][name].double() + after[name]
            scale = given[name].abs().max() + before[name].abs().max() + 1
            assert (arrived - given[name] - before[name]).abs().max() < 2e-6 * scale * size, name


UNBIASED = named(lambda traits: traits.unbiased)


@every(UNBIASED, slow=second_of_a_kind(UNBIASED))
def test_unbiasedness(method: str) -> None:
    """The mean of many runs is the mean of the inputs, within what chance allows."""
    size, trials, shapes = 2, 300, {"wide": (12, 25), "vector": (130,)}
    cohort = Cohort(method, size, shapes)
    inputs = cohort.inputs(7)
    runs = [
        torch.cat([t.flatten().double() for t in cohort.average(inputs)[0].values()]) for _ in range(trials)
    ]
    stacked = torch.stack(runs)
    truth = torch.cat([t.flatten() for t in total(inputs).values()]) / size
    deviation = stacked.mean(0) - truth
    rounding = 1e-6 * (1 + truth.abs())
    # Bernstein's bound: a coordinate may jump rarely and far, so its sample deviation alone is no measure.
    jump = (stacked - truth).abs().max()
    assert (deviation.abs() <= 6 * stacked.std(0) / math.sqrt(trials) + 8 * jump / trials + rounding).all()
    # And no common drift that is too small to see in one coordinate.
    signs = torch.randint(0, 2, (32, truth.numel()), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    signs[0] = 1
    signs[1] = truth.sign()
    spread = (stacked @ signs.double().T).std(0) / math.sqrt(trials) + rounding.sum()
    assert ((signs.double() @ deviation).abs() < 5 * spread).all()


def exact(methods: Iterable[str]) -> list[str]:
    """Their exact configurations; those that several have in common once."""
    found = [parse(method).exact() for method in methods]
    return sorted({str(method) for method in found if method is not None})


@every(exact(CONFIGURATIONS), quick=exact(DEFAULTS), size=SIZES)
def test_exact_configuration_equals_the_dense_mean(method: str, size: int) -> None:
    cohort = Cohort(parse(method).exact(), size)
    for step in range(2):
        inputs = cohort.inputs(step)
        truth = {name: sums / size for name, sums in total(inputs).items()}
        for name, output in cohort.average(inputs)[0].items():
            assert (output.double() - truth[name]).abs().max() <= 1e-5 * (1 + truth[name].abs().max()), name


# Vectors and scalars count as small. The codes of the large tensor are as long as the links differ in what
# they take for them: a gather, or a split and two shots.
OF_ALL_SIZES = SHAPES | {"large": (250, 400), "dot": (1, 1)}


@every(link=LINKS, size=SIZES)
def test_metered_bytes_equal_payload_bytes(method: str, link: str, size: int) -> None:
    """On every rank at every step; where ranks or steps are not alike, the most that occurs.

    Nothing is promised only where the data decide: bytes differ, or pieces are as long as they happen to be.
    """
    traits, seen = parse(method).traits, set[int]()
    cohort = Cohort(method, size, OF_ALL_SIZES, dense_below=1, link=slowest_link(link))
    promised = cohort.sessions[0].payload_bytes()
    assert promised is not None or traits.payload == "data-dependent", "other methods know their bytes"
    for session in cohort.sessions:  # after warm-ups, and between rare renewals: that is what is promised
        session.engine.step = 1_000_002
    for step in range(3):
        before = [meter.payload_bytes for meter in cohort.driver.meters]
        cohort.average(cohort.inputs(step))
        metered = [meter.payload_bytes - old for meter, old in zip(cohort.driver.meters, before, strict=True)]
        seen |= set(metered)
    if promised is None:
        assert len(seen) > 1 or "all_to_all" in cohort.driver.meters[0].by_operation
    elif traits.payload == "fixed":
        assert seen == {promised}
    else:
        assert max(seen) == promised


@every()
def test_purity(method: str) -> None:
    """Inputs and the global generator are untouched; the same seed gives the same bits.

    Another seed gives others where chance has a part, and the same where it has none.
    """
    first, again, other = (Cohort(method, 3, seed=seed) for seed in (5, 5, 6))
    generator, differs = torch.get_rng_state(), False
    for step in range(3):
        inputs = first.inputs(step)
        copies = [{name: t.clone() for name, t in one.items()} for one in inputs]
        outputs = first.average(inputs)
        assert same_state(inputs, copies)
        assert same_state(outputs, again.average(copies))
        differs |= not same_state(outputs, other.average(copies))
    assert torch.equal(generator, torch.get_rng_state())
    traits = parse(method).traits
    if traits.single_mean:
        assert not differs, "a mean has nothing to draw"
    elif traits.unbiased:
        assert differs, "unbiased compression draws at random, so another seed must show"


@every()
def test_in_place_gives_the_same_bits(method: str) -> None:
    apart, over = Cohort(method, 3), Cohort(method, 3)
    for step in range(3):
        inputs = apart.inputs(step)
        outputs = apart.average(inputs)
        results = over.average(inputs, in_place=True)
        assert same_state(outputs, results)
        assert same_state(inputs, results)


@every(dtype=[torch.float32, torch.float16, torch.bfloat16, torch.float64], size=[3, 1])
def test_edges(method: str, dtype: torch.dtype, size: int) -> None:
    """Zeros, one element, none at all, odd sizes, every dtype, a world of one."""
    shapes = {"none": (0,), "one": (1,), "odd": (7, 11), "long": (1, 129), "empty": (3, 0)}
    cohort = Cohort(method, size, shapes, dtype=dtype)
    zeros = [{name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()} for _ in range(size)]
    for outputs in (cohort.average(zeros), cohort.average(zeros)):
        for name in shapes:
            assert torch.equal(outputs[0][name], zeros[0][name]), "zeros stay zeros"
    outputs = cohort.average(cohort.inputs(1))
    for name, shape in shapes.items():
        assert outputs[0][name].shape == shape
        assert outputs[0][name].dtype == dtype
        assert outputs[0][name].isfinite().all()
    constant = [{name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()} for _ in range(size)]
    for _ in range(3):
        outputs = cohort.average(constant)
        assert all(t.isfinite().all() for t in outputs[0].values())


@every(PROMPT)
def test_non_finite_input_leaves_no_trace(method: str) -> None:
    """One non-finite number on one rank: the whole step is NaN on all ranks, and nothing is remembered.

    Means without state have no commit: one of them is non-finite in that place, and nowhere else.
    """
    cohort, untouched = Cohort(method, 3), Cohort(method, 3)
    for step in range(2):
        cohort.average(cohort.inputs(step))
        untouched.average(untouched.inputs(step))
    saved = copy.deepcopy([memory(session) for session in cohort.sessions])
    # Every value in either tensor and on two ranks, every rank with either tensor.
    values, tensors = (math.nan, math.inf, -math.inf), ("wide", "vector")
    for number, (value, tensor) in enumerate(itertools.product(values, tensors)):
        rank = (number // 2 + number % 2) % 3
        inputs = cohort.inputs(9 + number)
        inputs[rank][tensor].view(-1)[5] = value
        for session, outputs in zip(cohort.sessions, cohort.average(inputs), strict=True):
            if session.engine.remembers:
                assert all(output.isnan().all() for output in outputs.values()), (value, tensor, rank)
            else:
                bad = {name: output.isfinite().logical_not().sum() for name, output in outputs.items()}
                assert not outputs[tensor].view(-1)[5].isfinite(), (value, tensor, rank)
                assert sum(bad.values()) == 1, (value, tensor, rank)
        now = [memory(session) for session in cohort.sessions]
        assert same_state(saved, now), (value, tensor, rank)
    assert same_state(cohort.average(cohort.inputs(2)), untouched.average(untouched.inputs(2)))


@every(LATE)
def test_with_a_delay_non_finite_input_shows_in_the_next_step_and_leaves_no_trace(method: str) -> None:
    """The step itself hands out the mean before; the next one is not finite, on all ranks."""
    cohort, untouched = Cohort(method, 3), Cohort(method, 3)
    for step in range(2):
        cohort.average(cohort.inputs(step))
        untouched.average(untouched.inputs(step))
    saved = copy.deepcopy([session.engine.states.entries() for session in cohort.sessions])
    for number, value in enumerate((math.nan, math.inf, -math.inf)):
        inputs = cohort.inputs(9 + number)
        inputs[number]["wide"].view(-1)[5] = value
        for outputs in cohort.average(inputs):
            assert number or all(tensor.isfinite().all() for tensor in outputs.values())
            assert not number or all(tensor.isnan().all() for tensor in outputs.values())
        assert same_state(saved, [session.engine.states.entries() for session in cohort.sessions])
    after = cohort.average(cohort.inputs(2))
    assert all(tensor.isnan().all() for outputs in after for tensor in outputs.values())
    untouched.average(untouched.inputs(2))
    assert same_state(cohort.average(cohort.inputs(3)), untouched.average(untouched.inputs(3)))


@every()
def test_configuration_survives_round_trips(method: str) -> None:
    built = parse(method)
    assert parse(str(built)) == built
    assert parse(repr(built)) == built
    assert parse(to_json(built)) == built
    assert parse(json.loads(to_json(built))) == built
    assert hash(parse(str(built))) == hash(built)


@every()
def test_state_survives_a_round_trip(method: str, tmp_path) -> None:
    """8 steps straight equal 4, a checkpoint through a file, and 4 more, bit for bit."""
    straight, resumed = Cohort(method, 3), Cohort(method, 3)
    for step in range(8):
        if step == 4:
            for old, new in zip(straight.sessions, resumed.sessions, strict=True):
                path = tmp_path / f"rank{old.rank_info.rank}.pt"
                torch.save(old.state_dict(), path)
                new.load_state_dict(torch.load(path, weights_only=True))
        inputs = straight.inputs(step)
        outputs = straight.average(inputs)
        if step >= 4:
            assert same_state(outputs, resumed.average(inputs))
    assert same_state(
        [memory(session) for session in straight.sessions],
        [memory(session) for session in resumed.sessions],
    )


class Quadratic:
    """Ranks whose minima lie far apart: their gradients do not vanish at the common minimum."""

    def __init__(self, size: int) -> None:
        rng = torch.Generator().manual_seed(0)
        self.centres = [torch.randn(20, 30, generator=rng) * 3 for _ in range(size)]
        self.curvature = [0.5 + torch.rand(20, 30, generator=rng) for _ in range(size)]
        weighted = sum(c * m for c, m in zip(self.curvature, self.centres, strict=True))
        self.best = weighted / sum(self.curvature)

    def gradients(self, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return [{"wide": c * (x - m)} for c, m in zip(self.curvature, self.centres, strict=True)]


@every(named(lambda traits: traits.conserves or traits.elementwise), quick=(), slow=SLOW_CONVERGENCE)
def test_convergence_of_what_conserves(method: str) -> None:
    """Gradient descent comes to the common minimum, as it would with the exact mean."""
    # The smaller the ratio the more steps it takes, and nothing else is different.
    method = re.sub(r"\bratio=0\.0\d*", "ratio=0.1", str(parse(method)))
    size = 4 if parse(method).name == "hierarchical" else 2  # on two hosts, or two ranks
    problem, cohort = Quadratic(size), Cohort(method, size, {"wide": (20, 30)})
    x = torch.zeros(20, 30)
    # Error feedback delivers up to 1/ratio steps late, so the step size stays well below the ratio.
    ratios = re.findall(r"ratio=([0-9.]+)", str(parse(method)))
    first = 0.5 * min(0.04, *map(float, ratios), 1.0)
    steps = int(14 / first)
    for step in range(steps):
        rate = first * min(1.0, 4 * (1 - step / steps) ** 2)
        x = x - rate * cohort.average(problem.gradients(x))[0]["wide"]
    assert (x - problem.best).norm() < 0.02 * problem.best.norm()


@every(named(lambda traits: traits.unbiased and not traits.single_mean), quick=(), slow=SLOW_CONVERGENCE)
def test_convergence_of_what_is_unbiased(method: str) -> None:
    """With steps of 1/t the error falls to what the measured variance leaves after T steps: about var/T."""
    problem, cohort = Quadratic(4), Cohort(method, 4, {"wide": (20, 30)})
    at_best = [cohort.average(problem.gradients(problem.best))[0]["wide"] for _ in range(60)]
    variance = float(torch.stack(at_best).var(0).sum())
    x = torch.zeros(20, 30)
    steps = 400
    for step in range(steps):
        x = x - min(0.1, 1.5 / (step + 1)) * cohort.average(problem.gradients(x))[0]["wide"]
    error = float((x - problem.best).square().sum())
    assert error < 4 * variance / steps + (0.01 * float(problem.best.norm())) ** 2
