"""PQASGD, SPA-SGD and quantised SGD on a convolutional network, with momentum and with AdamW inside."""

from __future__ import annotations

from dataclasses import replace

from reproductions import seeds
from reproductions.base import Outcome
from reproductions.cohort import Recipe, images
from reproductions.parts import Context
from reproductions.seeds import SEEDS

WITHIN_POINTS = 0.3
DENSE, ALONE = "dense", "a worker alone"
# By the paper's names. Quantised SGD sends gradients, the others the parameters' changes.
METHODS = {
    "PQASGD": "pqasgd(every=8, bits=8)",
    "SPA-SGD": "spasgd(groups=8)",
    "quantised SGD": "qsgd(bits=4)",
}
# Beside the default, which leaves each worker its own momentum and moments.
AVERAGED = {"PQASGD, optimizer's state averaged": "pqasgd(every=8, bits=8, momentum='average')"}


def recipes(base: Recipe) -> dict[str, Recipe]:
    """The optimizers. Their rates suit dense training; all methods take the same."""
    return {
        "SGD": replace(base, learning_rate=0.1),
        "momentum 0.9": replace(base, learning_rate=0.02, momentum=0.9),
        "AdamW": replace(base, learning_rate=0.001, optimizer="adamw"),
    }


def study(context: Context, outcome: Outcome) -> None:
    """Every method with every optimizer, beside dense training and a worker alone."""
    data = images(context)
    workers, steps, batch = (2, 16, 8) if context.quick else (4, 400, 16)
    optimizers = recipes(Recipe("cnn", workers, steps, batch))
    how = SEEDS[:1] if context.quick else SEEDS
    rows: list[tuple[object, ...]] = []
    for optimizer, recipe in optimizers.items():
        variants = {DENSE: (DENSE, recipe), ALONE: (DENSE, replace(recipe, workers=1))}
        named = METHODS if optimizer == "SGD" else METHODS | AVERAGED
        variants |= {name: (method, recipe) for name, method in named.items()}
        found = seeds.train_all(context, variants, data, f"cnn, {optimizer}:", seeds=how, looks=1)
        dense = found[DENSE]
        for name, own in found.items():
            share = 0.0 if name == ALONE else seeds.payload(own) / seeds.payload(dense)
            rows.append((optimizer, name, seeds.accuracy(own), -seeds.behind(own, dense), share))
        behind = {name: seeds.behind(found[name], dense) for name in METHODS}
        alone = seeds.behind(found[ALONE], dense)
        tells = alone > WITHIN_POINTS
        outcome.claim(
            f"on a convolutional network with {optimizer} they converge like full communication, within "
            f"{WITHIN_POINTS} points at equal steps",
            "the same convergence for SPA-SGD, quantised SGD and PQASGD (abstract; optimizers not recovered)",
            "points behind dense: "
            + "; ".join(f"{name} {points:+.2f}" for name, points in behind.items())
            + f"; a worker alone {alone:+.2f}",
            max(behind.values()) <= WITHIN_POINTS if tells else None,
            "" if tells else "a worker alone is as good: a harder task would settle it",
        )
    outcome.table(
        f"{data.name}, convolutional network, {workers} workers, batches of {batch}, {steps} steps, "
        f"{len(how)} seeds",
        {"optimizer": "", "method": "", "accuracy": "", "to dense, points": "+.2f", "of dense": ".1%"},
        rows,
    )
