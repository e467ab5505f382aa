"""Predicted seconds per step of the language-model study, for every method on some links."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping

import torch

from benchmarks.common import threads_of_torch
from benchmarks.language_runs import ALONE, PYTORCH, Setting
from thinwire import predict
from thinwire.averaging import Schedule
from thinwire.core.exchange import Exchange
from thinwire.methods.registry import parse
from thinwire.net.costs import Link
from thinwire.predict.buckets import Shapes
from thinwire.tools.workloads import Dataset, build
from thinwire.tools.workloads.models import loss

LINKS: Mapping[str, Link] = {
    "10 Mbit/s": Link(bandwidth=1.25e6),
    "100 Mbit/s": Link(bandwidth=1.25e7),
    "1 Gbit/s": Link(bandwidth=1.25e8),
}
STAND_IN = "powersgd(rank=2)"
"""What PyTorch's own hook is predicted as: it sends the same factors."""
TIMED_STEPS = 5


def shapes_of(setting: Setting, data: Dataset) -> dict[str, tuple[int, ...]]:
    model = build("transformer", data, 0, setting.hidden)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def compute_seconds(setting: Setting, data: Dataset) -> float:
    """The median step of one worker, without any communication, on one thread of this machine."""
    recipe = setting.recipe(1e-3, 0)
    model = build(recipe.model, data, 0, recipe.hidden)
    optimizer = recipe.optimizer_for(model)
    order = torch.Generator().manual_seed(0)
    times: list[float] = []
    with threads_of_torch(1):
        for step in range(1 + TIMED_STEPS):
            inputs, targets = data.batch(torch.randint(len(data.inputs), (setting.batch,), generator=order))
            began = time.perf_counter()
            optimizer.zero_grad()
            loss(data, model(inputs), targets).backward()
            recipe.update(model, optimizer, step)
            times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def by_link(
    methods: Iterable[str], shapes: Shapes, workers: int, compute: float
) -> dict[str, dict[str, float]]:
    """Seconds per step by method and link. Warm-ups are over; what is sent inside a host takes no time."""
    return {
        method: {name: step_seconds(method, shapes, workers, link, compute) for name, link in LINKS.items()}
        for method in methods
    }


def step_seconds(method: str, shapes: Shapes, workers: int, link: Link, compute: float) -> float:
    if method == ALONE:
        return compute
    chosen = parse(STAND_IN if method == PYTORCH else method)
    if isinstance(chosen, Schedule):
        return _periodic(chosen, shapes, workers, link, compute)
    assert isinstance(chosen, Exchange)
    return predict.step_seconds(str(chosen), shapes, workers, link, compute)


def _periodic(schedule: Schedule, shapes: Shapes, workers: int, link: Link, compute: float) -> float:
    """The sync rounds of a cycle, less what `overlap` hides, shared out between its steps."""
    cycle = predict.step_seconds(str(schedule.inner), shapes, workers, link, 0.0, host="average")
    hidden = schedule.fragment_count * schedule.delay * compute
    return compute + max(0.0, cycle - hidden) / schedule.period
