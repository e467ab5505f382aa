"""What a comparison is to do, checked before any process starts."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError
from thinwire.hosts.auto import STEPS as MEASURING_STEPS
from thinwire.hosts.scripts import ALONE, AUTO, PYTORCH
from thinwire.methods.registry import parse
from thinwire.net import link as links
from thinwire.tools import devices
from thinwire.tools.compare.records import Setting
from thinwire.tools.workloads import build, load
from thinwire.version import __version__

Optimizer = Literal["sgd", "adam", "adamw"]
Baseline = Literal["none", "dense", "pytorch"]

METHODS = (
    "dense",
    ALONE,
    "fp16",
    "qsgd(bits=4)",
    "topk(ratio=0.01)",
    "powersgd(rank=2)",
    "pqasgd(every=8, bits=4)",
)
"""Compared unless the user names others: one of each kind, and the control, a worker without the others."""

NOT_METHODS = (*PYTORCH, AUTO, ALONE)
"""What may be compared and is no method string."""

BUILT_IN = (
    *("model", "data", "hidden", "epochs", "target_accuracy", "target_perplexity", "evaluate_every"),
    *("batch", "learning_rate", "optimizer", "momentum", "momentum_before", "device"),
)
"""Of a `Comparison`: what a script decides itself."""

EVALUATIONS = 20
"""Of a run, unless the user sets an interval."""


@dataclass(frozen=True)
class Script:
    """A training script to compare methods with.

    Args:
        path: its file, or with `module` the name of a module.
        arguments: for the script; "{seed}" stands for the number of the seed, from 0.
        patterns: of values in its output, see `script.output.read_patterns`.
    """

    path: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    patterns: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Comparison:
    """What a user asks for; None means the default of the model.

    Args:
        methods: full method strings, the baseline first if there is one (see `resolve_methods`).
        workers: local worker processes.
        device: where they compute, "cpu" or "cuda"; several workers may share a GPU.
        link: how they are joined, see `thinwire.net.link`.
        model: one of `workloads.MODELS`.
        data: a dataset, see `workloads.load`.
        hidden: widths of the model's layers, see `workloads.build`.
        steps: of training; or `epochs` over the training data.
        target_accuracy: stop at this test accuracy, a number between 0 and 1. For images.
        target_perplexity: stop at this test perplexity. For text.
        evaluate_every: steps between two evaluations.
        momentum: of SGD, in the optimizer: after the exchange.
        momentum_before: instead, each worker's own, applied to its gradients before the exchange.
        seeds: runs of every method, each with its own weights and batches.
        command: what the report shows as the command that made it.
        baseline: whether speed-ups are given, over the first method.
        script: train with this script instead of `model`, `data` and what belongs to them.
    """

    methods: Sequence[str]
    workers: int = 4
    device: devices.Name = "cpu"
    link: str = "100mbit"
    model: str = "mlp"
    data: str = "digits"
    hidden: tuple[int, ...] = ()
    steps: int | None = None
    epochs: float | None = None
    target_accuracy: float | None = None
    target_perplexity: float | None = None
    evaluate_every: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    optimizer: Optimizer | None = None
    momentum: float = 0.0
    momentum_before: float = 0.0
    seeds: int = 1
    command: str = "thinwire.compare"
    baseline: bool = True
    script: Script | None = None


class Recipe(NamedTuple):
    """Settings with which a model learns."""

    batch: int
    learning_rate: float
    optimizer: Optimizer
    steps: int


RECIPES = {
    "logistic": Recipe(32, 0.1, "sgd", 300),
    "mlp": Recipe(32, 0.1, "sgd", 300),
    "cnn": Recipe(32, 0.1, "sgd", 300),
    "resnet20": Recipe(32, 0.1, "sgd", 300),
    "lstm": Recipe(16, 0.004, "adam", 300),
    "transformer": Recipe(16, 0.002, "adam", 300),
}


LEARNING_RATES: dict[Optimizer, float] = {"sgd": 0.1, "adam": 0.002, "adamw": 0.002}
"""For an optimizer that is not the recipe's."""


def prepare(asked: Comparison) -> Setting:
    """Check everything that can be wrong and fill in the defaults."""
    if asked.script is not None:
        return _prepare_script(asked, asked.script)
    devices.checked(asked.device)
    data = load(asked.data)
    model = build(asked.model, data, 0, asked.hidden)
    recipe = RECIPES[asked.model]
    batch = asked.batch or recipe.batch
    steps = asked.steps or recipe.steps
    if asked.epochs is not None:
        if asked.steps is not None:
            raise ConfigError("give steps or epochs, not both")
        if not 0 < asked.epochs < math.inf:
            raise ConfigError(f"epochs must be above 0, not {asked.epochs:g}")
        steps = max(1, round(asked.epochs * len(data.inputs) / (batch * asked.workers)))
    if asked.learning_rate is not None and not 0 < asked.learning_rate < math.inf:
        raise ConfigError(f"the learning rate must be above 0, not {asked.learning_rate:g}")
    measure = "accuracy" if data.kind == "images" else "perplexity"
    link = links.parse(asked.link)
    _check_auto(asked, steps)
    optimizer = asked.optimizer or recipe.optimizer
    momentum = _momentum(asked, optimizer)
    check_optimizers(asked.methods, optimizer, momentum)
    usual = recipe.learning_rate if optimizer == recipe.optimizer else LEARNING_RATES[optimizer]
    return Setting(
        command=asked.command,
        thinwire=__version__,
        model=asked.model,
        hidden=asked.hidden,
        data=asked.data,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        workers=asked.workers,
        device=asked.device,
        cores=_cores(asked.workers),
        link=asked.link,
        bandwidth=None if link.unlimited else link.link.bandwidth,
        latency=link.link.latency,
        batch=batch,
        learning_rate=asked.learning_rate or usual * (1 - momentum),
        optimizer=optimizer,
        momentum=asked.momentum,
        momentum_before=asked.momentum_before,
        steps=steps,
        evaluate_every=asked.evaluate_every or max(1, steps // EVALUATIONS),
        seeds=asked.seeds,
        measure=measure,
        target=_target(asked, measure),
        baseline=asked.baseline,
    )


def _target(asked: Comparison, measure: str) -> float | None:
    """The target in the unit of the measure, if there is one."""
    accuracy, perplexity = asked.target_accuracy, asked.target_perplexity
    if accuracy is not None and measure != "accuracy":
        raise ConfigError("text has a target perplexity (--target-perplexity), not an accuracy")
    if perplexity is not None and measure != "perplexity":
        raise ConfigError("images have a target accuracy (--target-accuracy), not a perplexity")
    if accuracy is not None and not 0 < accuracy < 1:
        raise ConfigError(f"the target accuracy is a number between 0 and 1, not {accuracy:g}")
    if perplexity is not None and not 1 < perplexity < math.inf:
        raise ConfigError(f"the target perplexity is a number above 1, not {perplexity:g}")
    return perplexity if accuracy is None else accuracy


def _cores(workers: int) -> float:
    """All workers run on this machine, and times are measured while all of them work: one core at least."""
    return max(1.0, (os.cpu_count() or 1) / workers)


def _check_auto(asked: Comparison, steps: int | None) -> None:
    if AUTO in asked.methods and steps is not None and steps <= MEASURING_STEPS:
        raise ConfigError(
            f"auto measures {MEASURING_STEPS} steps before it chooses a method: give it more than {steps}"
        )


def _prepare_script(asked: Comparison, script: Script) -> Setting:
    """What the script trains, and how, is filled in after its first run."""
    for name, default in vars(Comparison(methods=())).items():
        if name in BUILT_IN and getattr(asked, name) != default:
            option = "--lr" if name == "learning_rate" else f"--{name}"
            raise ConfigError(
                f"{option.replace('_', '-')} is for the built-in tasks: the script decides that"
            )
    if not script.module and not Path(script.path).exists():
        raise ConfigError(f"there is no script {script.path}")
    _check_auto(asked, asked.steps)
    link = links.parse(asked.link)
    return Setting(
        command=asked.command,
        thinwire=__version__,
        script=shlex.join([script.path, *script.arguments]),
        model=Path(script.path).name,
        hidden=(),
        data="",
        parameters=0,
        layers={},
        workers=asked.workers,
        cores=_cores(asked.workers),
        link=asked.link,
        bandwidth=None if link.unlimited else link.link.bandwidth,
        latency=link.link.latency,
        batch=0,
        learning_rate=0.0,
        optimizer="",
        steps=asked.steps or 1,
        evaluate_every=1,
        seeds=asked.seeds,
        measure=next(iter(script.patterns), ""),
        target=None,
        baseline=asked.baseline,
    )


def _momentum(asked: Comparison, optimizer: Optimizer) -> float:
    for value in (asked.momentum, asked.momentum_before):
        if not 0 <= value < 1:
            raise ConfigError(f"momentum is a number from 0 up and below 1, not {value:g}")
    if asked.momentum and asked.momentum_before:
        raise ConfigError("give momentum or momentum before the exchange, not both")
    momentum = asked.momentum or asked.momentum_before
    if momentum and optimizer != "sgd":
        raise ConfigError(f"momentum is for SGD, and {optimizer} has its own: give --optimizer sgd")
    return momentum


def check_optimizers(methods: Sequence[str], optimizer: Optimizer, momentum: float = 0.0) -> None:
    """Adam, AdamW and SGD with momentum have steps of their own, which some methods do not go with."""
    used = f"SGD with momentum {momentum:g}" if optimizer == "sgd" else optimizer
    for method in methods:
        exchange = None if method in NOT_METHODS else parse(method)
        need = exchange.traits.optimizer if isinstance(exchange, Exchange) else "any"
        if need == "Adam" and optimizer == "sgd":
            raise ConfigError(f"{method} averages Adam's momentum: give --optimizer adamw, or leave it out")
        if need not in ("any", "Adam") and (optimizer != "sgd" or momentum):
            why = "keeps the momentum itself" if need == "no momentum" else "skips uploads by a rule for SGD"
            raise ConfigError(
                f"{method} {why}: give --optimizer sgd without momentum, or leave it out with {used}"
            )


def resolve_methods(chosen: Sequence[str], baseline: Baseline | None = None) -> list[str]:
    """Full method strings, each one once, the baseline first.

    Every entry may hold several methods with commas between them. The baseline is added if it is missing. By
    default it is PyTorch's own DDP if that is among them, and `dense` otherwise.
    """
    texts = [part for text in chosen for part in split(text)] or list(METHODS)
    full = [text if text in NOT_METHODS else str(parse(text)) for text in texts]
    first = baseline or ("pytorch" if "pytorch" in full else "dense")
    return list(dict.fromkeys(full if first == "none" else [first, *full]))


def split(text: str) -> list[str]:
    """Cut at the commas that are not inside parentheses or quotes."""
    parts, depth, quote = [""], 0, ""
    for symbol in text:
        if quote:
            quote = "" if symbol == quote else quote
        elif symbol in "'\"":
            quote = symbol
        elif symbol == "," and depth == 0:
            parts.append("")
            continue
        depth += (symbol in "([{") - (symbol in ")]}") if not quote else 0
        parts[-1] += symbol
    if depth or quote:
        raise ConfigError(f"{text!r} is not a method: a parenthesis or a quote is not closed")
    return [part.strip() for part in parts if part.strip()]
