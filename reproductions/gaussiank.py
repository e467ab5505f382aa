"""Gaussian-k: what gradients look like, how much a selection loses, how long it takes, and accuracy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean

from reproductions.base import Outcome, Reproduction
from reproductions.cohort import Recipe, Training, images, train
from reproductions.gaussiank_selection import RATIO, SELECTIONS, selection_times
from reproductions.gaussiank_shapes import BINS, RANGE, Shape, normal, shapes
from reproductions.parts import Context
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.data import cifar10, synthetic, text

SIZES = (100_000, 1_000_000, 10_000_000)
LOOKS = 5
EXACT = "exact top-k, torch"
LONE = "a lone worker"
Workloads = dict[str, tuple[Recipe, Dataset]]


def _workloads(context: Context) -> Workloads:
    quick = context.quick
    pictures = images(context)
    real = context.has_data and not quick
    words = text(context.data / "tinyshakespeare" / "input.txt") if real else synthetic()
    photos = cifar10(context.data / "cifar10") if real else pictures
    logistic = Recipe("logistic", workers=2, steps=24 if quick else 300, dense_below=256)
    mlp = Recipe("mlp", workers=2, steps=24 if quick else 300, hidden=(64,) if quick else (200,))
    cnn = Recipe("cnn", workers=2, steps=24 if quick else 200, batch=16, learning_rate=0.05)
    steps, batch = (6, 4) if quick else (120, 8)
    resnet = Recipe("resnet20", workers=2, steps=steps, batch=2 * batch)
    lstm = Recipe("lstm", workers=2, steps=steps, batch=batch, learning_rate=1.0)
    transformer = Recipe("transformer", workers=2, steps=steps, batch=batch)
    return {
        "logistic regression": (logistic, pictures),
        "MLP": (mlp, pictures),
        "CNN": (cnn, pictures),
        "ResNet-20": (resnet, photos),
        "LSTM": (lstm, words),
        "transformer": (transformer, words),
    }


def _trainings(context: Context, work: Workloads) -> dict[str, tuple[Recipe, Dataset, int]]:
    """What is trained to compare accuracies, and with how many seeds."""
    if context.quick:
        return {"MLP": (replace(work["MLP"][0], workers=4, steps=40), work["MLP"][1], 1)}
    mlp = replace(work["MLP"][0], workers=4, steps=3000)
    resnet = replace(work["ResNet-20"][0], workers=4, steps=2400, batch=32, momentum=0.9, decay_at=0.7)
    lstm = replace(work["LSTM"][0], workers=4, steps=1000)
    return {
        "MLP": (mlp, work["MLP"][1], 3),
        "ResNet-20": (resnet, work["ResNet-20"][1], 1),
        "LSTM": (lstm, work["LSTM"][1], 1),
    }


def run(context: Context) -> Outcome:
    quick = context.quick
    work = _workloads(context)
    looks = context.each(
        {label: partial(shapes, *one, LOOKS, RATIO) for label, one in work.items()}, "shape of"
    )
    times: dict[int, dict[str, float]] = {}
    for number, size in enumerate(sizes := SIZES[:1] if quick else SIZES):
        context.progress(f"selection among {size:,}", number, len(sizes))
        # Seconds are of this machine, so they are measured anew at every run.
        times[size] = selection_times(size, 3 if quick else 7)
    outcome = Outcome(judged=not quick)
    _shapes(outcome, looks)
    _fits(outcome, looks)
    _losses(outcome, looks)
    _counts(outcome, looks)
    _times(outcome, times)
    for label, (recipe, data, seeds) in _trainings(context, work).items():
        _accuracy(outcome, label, recipe, _train(context, label, recipe, data, seeds))
    return outcome


def _train(
    context: Context, label: str, recipe: Recipe, data: Dataset, seeds: int
) -> dict[str, list[Training]]:
    """Every method with every seed, and a lone worker; with a warm-up of the density, as the authors have."""
    warmup = recipe.steps // 20
    methods = {"dense": "dense", LONE: "dense"}
    methods |= {name: f"{name}(ratio={RATIO}, warmup={warmup})" for name in ("topk", "gaussiank")}
    runs = {
        (name, seed): partial(
            train, method, replace(recipe, seed=seed, workers=1 if name == LONE else recipe.workers), data
        )
        for seed in range(seeds)
        for name, method in methods.items()
    }
    found = context.each(runs, f"accuracy of {label}")
    return {name: [found[name, seed] for seed in range(seeds)] for name in methods}


def _shapes(outcome: Outcome, looks: dict[str, list[Shape]]) -> None:
    centre = [-RANGE + 2 * RANGE * (number + 0.5) / BINS for number in range(BINS)]
    for label, found in looks.items():
        curves = {"normal": (centre, [normal(x) for x in centre])}
        curves |= {f"step {one.step}": (centre, one.histogram) for one in found}
        title = f"residual + gradient of {label}, standardised"
        outcome.figure(title, curves, "standard deviations from the mean", "density")
    outcome.table(
        f"residual + gradient with top-k {100 * RATIO:g} %",
        {
            "model": "",
            "step": "",
            "mean / deviation": "+.4f",
            "excess kurtosis": ".1f",
            "where it rises": ".2%",
        },
        [
            (label, one.step, one.mean / one.deviation, one.kurtosis, one.against)
            for label, found in looks.items()
            for one in found
        ],
    )
    everything = [one for found in looks.values() for one in found]
    means = [abs(one.mean / one.deviation) for one in everything]
    against = [one.against for one in everything]
    outcome.claim(
        "gradients are bell-shaped around zero in every model",
        "for six models (histograms)",
        f"|mean| at most {max(means):.3f} deviations; {100 * max(against):.2f} % of the entries at most lie "
        "where a histogram rises away from zero, beyond chance",
        max(means) < 0.2 and max(against) < 0.01,
    )


def _fits(outcome: Outcome, looks: dict[str, list[Shape]]) -> None:
    last = {label: found[-1].fits for label, found in looks.items()}
    names = [fit.family for fit in next(iter(last.values()))]
    best = {label: max(fits, key=lambda fit: fit.log_likelihood) for label, fits in last.items()}
    outcome.table(
        "distances (Kolmogorov and Smirnov) of fits to residual + gradient at the last step, without zeros",
        {"model": ""} | dict.fromkeys(names, ".3f") | {"most likely": ""},
        [
            (label, *(fit.distance for fit in fits), f"{best[label].family}, shape {best[label].shape:.2f}")
            for label, fits in last.items()
        ],
    )
    kurtoses = [one.kurtosis for found in looks.values() for one in found]
    best_distances = [fit.distance for fit in best.values()]
    distances = [next(fit.distance for fit in fits if fit.family == "Gaussian") for fits in last.values()]
    outcome.claim(
        "a normal distribution describes them",
        "the threshold is a normal quantile (approximation)",
        f"distance {min(distances):.2f} to {max(distances):.2f}, of the most likely fit "
        f"{min(best_distances):.2f} to {max(best_distances):.2f}; "
        f"excess kurtosis {min(kurtoses):.0f} to {max(kurtoses):.0f}",
        max(distances) <= 0.05,
        "tails are far heavier than normal: this is why thinwire corrects the threshold until it fits",
    )


def _losses(outcome: Outcome, looks: dict[str, list[Shape]]) -> None:
    last = {label: found[-1].loss for label, found in looks.items()}
    largest = max(last.values(), key=lambda loss: loss.size)
    curves = {"bound 1 - k/d": (largest.kept, largest.classic)}
    curves["bound (1 - k/d)^2"] = (largest.kept, largest.tight)
    curves |= {label: (loss.kept, loss.lost) for label, loss in last.items()}
    outcome.figure(
        "what top-k loses of residual + gradient, and its bounds",
        curves,
        "k/d, the share of entries that is kept",
        "lost share of ||u||^2",
        log="x",
    )
    rows: list[tuple[object, ...]] = []
    for label, loss in last.items():
        kept, lost = loss.near(RATIO)
        rows.append((label, loss.size, kept, lost, 1 - kept, (1 - kept) ** 2, loss.worst))
    outcome.table(
        "||u - top_k(u)||^2 / ||u||^2 at the last step, bounds, and the largest part of the last one over k",
        {"model": "", "d": ",", "k/d": ".3%"}
        | dict.fromkeys(("lost", "1 - k/d", "(1 - k/d)^2"), ".4f")
        | {"largest part": ".3f"},
        rows,
    )
    worst = {label: max(one.loss.worst for one in found) for label, found in looks.items()}
    outcome.claim(
        "what top-k loses is below (1 - k/d)^2 at every k, not only below 1 - k/d",
        "(1 - k/d)^2",
        f"{max(worst.values()):.3f} of it at most ({max(worst, key=lambda label: worst[label])})",
        max(worst.values()) <= 1,
        "it is far from tight: of heavy tails, top-k loses much less",
    )


def _counts(outcome: Outcome, looks: dict[str, list[Shape]]) -> None:
    ranges: dict[str, tuple[float, float]] = {}
    names = list(next(iter(looks.values()))[0].counts)
    for name in names:
        counts = [one.counts[name] for found in looks.values() for one in found]
        ranges[name] = (min(counts), max(counts))
    rows = [
        (label, one.step, *(one.counts[name] for name in names), *_relative(one))
        for label, found in looks.items()
        for one in found[-1:]
    ]
    outcome.table(
        f"how many entries are selected, in k = {100 * RATIO:g} % of them, at the last step; and the time of "
        "Gaussian-k, in times of an exact top-k of torch",
        {"model": "", "step": ""}
        | dict.fromkeys(names, ".2f")
        | {"time, authors' loop": ".2f", "time, thinwire": ".2f"},
        rows,
    )
    low, high = ranges["thinwire"]
    others = "; ".join(f"{name} {a:.2f} to {b:.2f}" for name, (a, b) in ranges.items() if name != "thinwire")
    outcome.claim(
        "the threshold selects about k entries",
        "2k/3 to 4k/3, in at most three corrections",
        f"thinwire {low:.2f} to {high:.2f} of k; {others}",
        low >= 2 / 3 and high <= 4 / 3,
        "judged by thinwire's search; the authors' third correction is never counted again",
    )


def _relative(one: Shape) -> tuple[float, float]:
    exact = one.seconds[EXACT]
    return one.seconds["Gaussian-k, torch"] / exact, one.seconds["thinwire Gaussian-k"] / exact


def _times(outcome: Outcome, times: dict[int, dict[str, float]]) -> None:
    outcome.table(
        f"time of a selection of {100 * RATIO:g} %, in copies of the vector (one thread, best of several)",
        {"selection": ""} | {f"d = {size:,}": ".2f" for size in times},
        [(name, *(one[name] for one in times.values())) for name in SELECTIONS],
    )
    largest = times[max(times)]
    outcome.claim(
        "Gaussian-k selects much faster than an exact top-k",
        "exact top-k slowest, Gaussian-k fastest (on GPUs)",
        f"torch: {largest[EXACT] / largest['Gaussian-k, torch']:.1f} x; thinwire's exact top-k takes "
        f"{largest['thinwire exact top-k']:.2f} copies, its Gaussian-k {largest['thinwire Gaussian-k']:.2f}",
        None,
        "the paper measures GPUs, this is a CPU: every count is a pass over memory, torch's own selection is "
        "quick, and with a sampled threshold thinwire's exact selection needs a single pass",
    )


def _accuracy(outcome: Outcome, label: str, recipe: Recipe, runs: dict[str, list[Training]]) -> None:
    mean = {name: fmean(one.accuracy for one in found) for name, found in runs.items()}
    seeds = len(runs["dense"])
    outcome.table(
        f"{label}: test accuracy, {recipe.workers} workers, {recipe.steps:,} steps, {100 * RATIO:g} % sent, "
        f"{seeds} seed{'s' * (seeds > 1)}",
        {"method": "", "accuracy": ".2%", "payload per step": ",.0f"},
        [(name, mean[name], fmean(one.payload for one in found)) for name, found in runs.items()],
    )
    behind_topk = 100 * (mean["topk"] - mean["gaussiank"])
    behind_dense = 100 * (mean["dense"] - mean["gaussiank"])
    alone = 100 * (mean["dense"] - mean[LONE])
    outcome.claim(
        f"{label}: accuracy like top-k's",
        "close to top-k",
        f"{behind_topk:+.2f} points behind top-k",
        behind_topk <= 0.5,
    )
    outcome.claim(
        f"{label}: accuracy near dense",
        "slightly below dense",
        f"{behind_dense:+.2f} points behind dense; a lone worker {alone:+.2f}",
        None if alone < 0.5 else behind_dense <= 1 and behind_dense < alone,
        "the lone worker is as good: these steps cannot tell" if alone < 0.5 else "",
    )


REPRODUCTION = Reproduction(
    "A threshold from two moments in place of a sort",
    "Shi, Chu, Cheung and See, Understanding top-k sparsification in distributed deep learning, 2019.",
    run,
    methods=("gaussiank", "topk"),
)
