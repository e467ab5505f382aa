"""One run of the language-model study: a method, a learning rate, a seed."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reproductions.cohort import Cohort, LocalCohort, Recipe, Workers, mean_into
from thinwire.averaging import Schedule
from thinwire.hosts.scripts import add_pytorch_hook
from thinwire.methods.registry import parse
from thinwire.net.launch import Worker, run_local
from thinwire.net.metered_group import MeteredGroup
from thinwire.tools.workloads import Dataset, build, load
from thinwire.tools.workloads.models import evaluate, loss

ALONE = "alone"
PYTORCH = "pytorch-powersgd"
TEST_ROWS = 256
LOOKS = 10


@dataclass(frozen=True)
class Setting:
    """What is trained, on what, by how many."""

    data: str
    hidden: tuple[int, ...]
    workers: int
    steps: int
    batch: int

    def recipe(self, rate: float, seed: int) -> Recipe:
        return Recipe(
            "transformer",
            workers=self.workers,
            steps=self.steps,
            batch=self.batch,
            learning_rate=rate,
            seed=seed,
            hidden=self.hidden,
            optimizer="adamw",
            warm_up=self.steps // 20,
            cosine=True,
            clip=1.0,
        )


class Run(msgspec.Struct):
    """What came of it. `losses` are (step, validation loss); `sent` is per step, in the second half."""

    method: str
    rate: float
    seed: int
    losses: list[tuple[int, float]]
    sent: float

    @property
    def loss(self) -> float:
        return self.losses[-1][1]


def train(setting: Setting, method: str, rate: float, seed: int) -> Run:
    recipe, data = setting.recipe(rate, seed), load(setting.data)
    if method == PYTORCH:
        return run_local(_with_pytorch, setting.workers, setting, rate, seed, timeout=36000)[0]
    cohort = _cohort(method, recipe, data)
    losses: list[tuple[int, float]] = []
    halfway = whole = 0
    for number in cohort.run(LOOKS):
        whole = cohort.spent().sent_bytes
        if number == setting.steps // 2:
            halfway = whole
        if number == setting.steps:
            cohort.sync()
        losses.append((number, evaluate(_mean(cohort.models), data, TEST_ROWS)[0]))
    return Run(method, rate, seed, losses, (whole - halfway) / (setting.steps - setting.steps // 2))


def _cohort(method: str, recipe: Recipe, data: Dataset) -> Workers:
    if method == ALONE:
        return Cohort("dense", replace(recipe, workers=1), data)
    schedule = isinstance(parse(method), Schedule)
    return LocalCohort(method, recipe, data) if schedule else Cohort(method, recipe, data)


def _mean(models: list[nn.Module]) -> nn.Module:
    if len(models) == 1:
        return models[0]
    mean = copy.deepcopy(models[0])
    mean_into(mean, models)
    return mean


def _with_pytorch(worker: Worker, setting: Setting, rate: float, seed: int) -> Run:
    """PyTorch's hook by processes, with the batches and the weights of the other runs."""
    torch.set_num_threads(1)
    recipe, data = setting.recipe(rate, seed), load(setting.data)
    model = build(recipe.model, data, seed, recipe.hidden)
    group = MeteredGroup()
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1000)
    add_pytorch_hook(wrapped, PYTORCH, group)
    optimizer = recipe.optimizer_for(model)
    order = torch.Generator().manual_seed(1 + seed)
    losses: list[tuple[int, float]] = []
    halfway = 0
    for step in range(setting.steps):
        rows = torch.randint(len(data.inputs), (setting.workers, setting.batch), generator=order)[worker.rank]
        inputs, targets = data.batch(rows)
        optimizer.zero_grad()
        loss(data, wrapped(inputs), targets).backward()
        for each in optimizer.param_groups:
            each["lr"] = recipe.rate(step)
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        if step + 1 == setting.steps // 2:
            halfway = group.meter.sent_bytes
        if (step + 1) % max(1, setting.steps // LOOKS) == 0 or step + 1 == setting.steps:
            losses.append((step + 1, evaluate(model, data, TEST_ROWS)[0]))
    sent = (group.meter.sent_bytes - halfway) / (setting.steps - setting.steps // 2)
    dist.barrier()
    group.close()
    return Run(PYTORCH, rate, seed, losses, sent)
