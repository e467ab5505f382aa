"""PQASGD, SPA-SGD and quantised SGD on a convolutional network, with momentum and with AdamW inside."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

from reproductions.base import Outcome
from reproductions.cohort import Recipe, images, train
from reproductions.parts import Context

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
    seeds = (0,) if context.quick else (0, 1)
    optimizers = recipes(Recipe("cnn", workers, steps, batch))
    variants: dict[tuple[str, str], tuple[str, Recipe]] = {}
    for optimizer, recipe in optimizers.items():
        variants[optimizer, DENSE] = (DENSE, recipe)
        variants[optimizer, ALONE] = (DENSE, replace(recipe, workers=1))
        methods = METHODS if optimizer == "SGD" else METHODS | AVERAGED
        variants |= {(optimizer, name): (method, recipe) for name, method in methods.items()}
    found = context.each(
        {
            (*key, seed): partial(train, method, replace(recipe, seed=seed), data, looks=1)
            for key, (method, recipe) in variants.items()
            for seed in seeds
        },
        "cnn:",
    )
    accuracy = {key: statistics.fmean(found[*key, seed].accuracy for seed in seeds) for key in variants}
    payload = {key: found[*key, seeds[0]].payload for key in variants}
    outcome.table(
        f"{data.name}, convolutional network, {workers} workers, batches of {batch}, {steps} steps, mean of "
        f"{len(seeds)} seeds",
        {"optimizer": "", "method": "", "accuracy": ".2%", "to dense, points": "+.2f", "of dense": ".1%"},
        [
            (
                optimizer,
                name,
                value,
                100 * (value - accuracy[optimizer, DENSE]),
                0.0 if name == ALONE else payload[optimizer, name] / payload[optimizer, DENSE],
            )
            for (optimizer, name), value in accuracy.items()
        ],
    )
    for optimizer in optimizers:
        behind = {name: 100 * (accuracy[optimizer, DENSE] - accuracy[optimizer, name]) for name in METHODS}
        alone = 100 * (accuracy[optimizer, DENSE] - accuracy[optimizer, ALONE])
        outcome.claim(
            f"on a convolutional network with {optimizer} they converge like full communication, within "
            f"{WITHIN_POINTS} points at equal steps",
            "the same convergence for SPA-SGD, quantised SGD and PQASGD (abstract; optimizers not recovered)",
            "points behind dense: "
            + "; ".join(f"{name} {points:+.2f}" for name, points in behind.items())
            + f"; a worker alone {alone:+.2f}",
            max(behind.values()) <= WITHIN_POINTS,
        )
