"""Accuracy with 16 to 256 workers: a transformer, an LSTM and a residual network, at equal rows per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from reproductions import seeds
from reproductions.base import Outcome, Section
from reproductions.cohort import Recipe
from reproductions.parts import Context
from reproductions.small import TEST_ROWS, shared_by, workloads
from thinwire.tools.workloads import Dataset, build

DENSE, LONE = "dense", "a worker alone"
FEW = 16
"""Workers; one of them alone has this part of the rows."""
WITHIN_POINTS = 0.5
Methods = dict[str, tuple[str, Recipe]]


def parameters_of(recipe: Recipe, data: Dataset) -> int:
    return sum(p.numel() for p in build(recipe.model, data, 0, recipe.hidden).parameters())


def controls(recipe: Recipe) -> Methods:
    """Dense training does not depend on the workers that share the rows, so one does; and a worker alone."""
    return {DENSE: (DENSE, recipe), LONE: (DENSE, replace(shared_by(recipe, FEW), workers=1))}


def study(
    context: Context, outcome: Outcome, model: str, methods: Methods, title: str, rows: int
) -> dict[str, seeds.Runs]:
    """Train everything, and a table of it."""
    data = workloads(context)[model][1]
    chosen = seeds.SEEDS[:1] if context.quick else seeds.SEEDS
    found = seeds.train_all(
        context,
        methods,
        data,
        f"{model}:",
        seeds=chosen,
        looks=2,
        test_rows=0 if context.quick else TEST_ROWS,
    )
    dense = found[DENSE]
    what = "next characters" if data.kind == "text" else "images"
    outcome.table(
        f"{model}, {data.name}, {title}, {rows:,} rows per step, {len(chosen)} seeds: {what} that are right",
        {"": "", **seeds.columns(dense), "to dense, points": "+.2f", "last loss": ".4f", "of dense": ""},
        [
            (
                label,
                *seeds.cells(runs),
                -seeds.behind(runs, dense),
                seeds.last_loss(runs),
                "-" if label == LONE else f"1 / {seeds.payload(dense) / max(1.0, seeds.payload(runs)):.0f}",
            )
            for label, runs in found.items()
        ],
    )
    return found


def judge(
    outcome: Outcome, data: Dataset, what: str, paper: str, found: Mapping[str, seeds.Runs], own: list[str]
) -> None:
    """Fails if one of `own` is more than half a point below dense.

    Not judged if a worker alone is not, or if dense has not learned.
    """
    dense, alone = found[DENSE], seeds.behind(found[LONE], found[DENSE])
    steps = dense[0].accuracies[-1][0]
    lost = {label: seeds.behind(found[label], dense) for label in own}
    tells = alone > WITHIN_POINTS and seeds.has_learned(dense, data)
    outcome.claim(
        what,
        paper,
        "points below dense: " + "; ".join(f"{label} {points:+.2f}" for label, points in lost.items()),
        max(lost.values()) <= WITHIN_POINTS if tells else None,
        f"a worker alone {alone:+.2f}; dense {seeds.accuracy(dense)}, after {steps:,} steps"
        + ("" if tells else ": these steps cannot tell; longer runs would"),
    )


def sections(what: str, run: Callable[[Context, Outcome, str], None]) -> tuple[Section, ...]:
    """One for each model, the fastest first."""

    def of(model: str) -> Section:
        return Section(f"{model}: {what}", lambda context, outcome: run(context, outcome, model))

    return tuple(of(model) for model in ("transformer", "LSTM", "ResNet-20"))
