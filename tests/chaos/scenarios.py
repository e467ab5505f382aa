"""What can go wrong: a fault, on one rank, at one step, under one method and host."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import thinwire
from thinwire.core.exchange import Exchange

Fault = Literal[
    "kill",
    "stop",
    "delay",
    "exception",
    "early end",
    "nan",
    "mismatch",
    "hostile payload",
    "torn file",
    "full disk",
    "growth",
    "shrinkage",
]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]
FATAL: tuple[Fault, ...] = ("kill", "stop", "exception", "early end", "hostile payload")
"""After these the other ranks must raise; nothing may have been committed without all ranks."""
RESIZES: tuple[Fault, ...] = ("growth", "shrinkage")
"""The culprit joins, or leaves, at a checkpoint that the others continue."""

STEPS = 8
FIRST, LAST = 2, 5
"""A fault comes in one of these steps. DDP makes its buckets, over a group of its own, before."""


@dataclass(frozen=True)
class Scenario:
    """One fault. Ranks other than the culprit only train."""

    number: int
    fault: Fault
    host: Literal["ddp", "ddp without overlap", "session", "periodic"]
    method: str
    culprit: int
    step: int
    seconds: float
    """How long a delay takes, or how far into the step a kill comes; 0 is before it."""
    model: Literal["mlp", "transformer"] = "mlp"
    optimizers: Literal["sgd", "adamw", "muon, adamw"] = "sgd"

    @property
    def label(self) -> str:
        return (
            f"{self.number}: {self.fault} on rank {self.culprit} after {self.step} steps, {self.host}, "
            f"{self.method}, {self.model} with {self.optimizers}"
        )


def per_step() -> list[str]:
    """Every registered exchange, with options at which a small model sends and keeps a fair part."""
    busy = {
        "topk": "topk(ratio=0.2)",
        "gaussiank": "gaussiank(ratio=0.2)",
        "randomk": "randomk(ratio=0.3)",
        "randomblock": "randomblock(ratio=0.3)",
        "powersgd": "powersgd(rank=1)",
        "scalecom": "scalecom(ratio=0.2)",
        "dgc": "dgc(ratio=0.2)",
        "demo": "demo(ratio=0.2)",
        "adam": "adam(exchange=topk(ratio=0.2), warmup=2)",
        "ef21": "ef21(exchange=topk(ratio=0.2))",
        "hierarchical": "hierarchical(outer=topk(ratio=0.2), local=2)",
    }
    return [
        busy.get(name, name)
        for name, cls in thinwire.list_methods().items()
        if issubclass(cls, Exchange) and not cls().traits.delayed  # its faults show a step later
    ]


def schedules() -> list[str]:
    """Every registered schedule, in short cycles; overlapped and in fragments as well."""
    short = {
        "periodic": "periodic(exchange=topk(ratio=0.2), every=2)",
        "spasgd": "spasgd(groups=2)",
        "postlocal": "postlocal(every=2, warmup=4)",
    }
    return [
        *(short.get(name, f"{name}(every=2)") for name in thinwire.list_schedules()),
        "pqasgd(every=3, bits=8, overlap=1)",
        "diloco(every=4, fragments=2)",
    ]


def draw(count: int, seed: int, workers: int) -> list[Scenario]:
    """The same scenarios for the same numbers. Each fault comes equally often, each method in turn."""
    rng = random.Random(seed)
    turns = {"periodic": _in_turn(schedules(), rng), "other": _in_turn(per_step(), rng)}
    found: list[Scenario] = []
    for number in range(count):
        fault = FAULTS[number % len(FAULTS)]
        host = rng.choice(("ddp", "ddp", "ddp without overlap", "session", "periodic"))
        method = next(turns["periodic" if host == "periodic" else "other"])
        moment = rng.choice((0.0, rng.uniform(0, 0.02))) if fault == "kill" else rng.uniform(0.1, 0.8)
        culprit, step = rng.randrange(workers), rng.randint(FIRST, LAST)
        model = rng.choice(("mlp", "transformer"))
        optimizers = rng.choice(_optimizers(method, model))
        found.append(Scenario(number, fault, host, method, culprit, step, moment, model, optimizers))
    return found


def _optimizers(method: str, model: str) -> tuple[str, ...]:
    """Those that the method allows and people train such a model with."""
    chosen = thinwire.parse(method)
    needs = chosen.traits.optimizer if isinstance(chosen, Exchange) else "any"
    if needs in ("no momentum", "plain SGD"):
        return ("sgd",)
    if needs == "Adam":
        return ("adamw",)
    return ("adamw", "muon, adamw") if model == "transformer" else ("sgd", "adamw", "muon, adamw")


def _in_turn(names: Sequence[str], rng: random.Random):
    while True:
        yield from rng.sample(names, len(names))


def batches(scenarios: Sequence[Scenario], length: int) -> list[list[Scenario]]:
    """Scenarios that run one after the other in the same processes; a kill ends its batch."""
    found: list[list[Scenario]] = [[]]
    for scenario in scenarios:
        found[-1].append(scenario)
        if scenario.fault == "kill" or len(found[-1]) == length:
            found.append([])
    return [batch for batch in found if batch]
