"""One run of the language-model study: a method, a learning rate, a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reproductions.cohort import Recipe, cohort_of
from thinwire.core.exchange import Exchange
from thinwire.hosts.scripts import ALONE, ONE_BUCKET_MB, add_pytorch_hook
from thinwire.methods.registry import parse
from thinwire.net.launch import Worker, run_local
from thinwire.net.metered_group import MeteredGroup
from thinwire.tools.workloads import build, load
from thinwire.tools.workloads.models import evaluate, loss

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

    def public(self) -> Setting:
        """Without the folders of this machine: `text:DATA/name/file`."""
        kind, colon, path = self.data.partition(":")
        return replace(self, data=f"{kind}:DATA/{'/'.join(PurePath(path).parts[-2:])}" if colon else kind)

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
    name = method
    if method == ALONE:
        method, recipe = "dense", replace(recipe, workers=1)
    if keeps_the_momentum(method):
        recipe = replace(recipe, optimizer="sgd", clip=None)
    cohort = cohort_of(method, recipe, data)
    noted = Noted(setting.steps)
    for number in cohort.run(LOOKS):
        sent = cohort.spent().sent_bytes
        if number == setting.steps:
            cohort.sync()
        noted.look(number, evaluate(cohort.mean_model(), data, TEST_ROWS)[0], sent)
    return Run(name, rate, seed, noted.losses, noted.per_step)


def keeps_the_momentum(method: str) -> bool:
    """Whether a method takes AdamW's place: plain SGD applies its steps, as they are."""
    chosen = None if method in (ALONE, PYTORCH) else parse(method)
    return isinstance(chosen, Exchange) and chosen.traits.optimizer == "no momentum"


class Noted:
    """Losses and bytes of a run at some of its steps."""

    def __init__(self, steps: int) -> None:
        self.losses: list[tuple[int, float]] = []
        self.per_step = 0.0
        self._steps = steps
        self._first = 0, 0  # the last look in the first half: its step, and what had been sent

    def look(self, step: int, loss: float, sent: int) -> None:
        self.losses.append((step, loss))
        if 2 * step <= self._steps:
            self._first = step, sent
        else:
            self.per_step = (sent - self._first[1]) / (step - self._first[0])


def _with_pytorch(worker: Worker, setting: Setting, rate: float, seed: int) -> Run:
    """PyTorch's hook by processes, with the batches and the weights of the other runs."""
    torch.set_num_threads(1)
    recipe, data = setting.recipe(rate, seed), load(setting.data)
    model = build(recipe.model, data, seed, recipe.hidden)
    group = MeteredGroup()
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=ONE_BUCKET_MB)
    add_pytorch_hook(wrapped, PYTORCH, group)
    optimizer = recipe.optimizer_for(model)
    order = torch.Generator().manual_seed(1 + seed)
    noted = Noted(setting.steps)
    for step in range(setting.steps):
        rows = torch.randint(len(data.inputs), (setting.workers, setting.batch), generator=order)[worker.rank]
        inputs, targets = data.batch(rows)
        optimizer.zero_grad()
        loss(data, wrapped(inputs), targets).backward()
        recipe.update(model, optimizer, step)
        if (step + 1) % max(1, setting.steps // LOOKS) == 0 or step + 1 == setting.steps:
            noted.look(step + 1, evaluate(model, data, TEST_ROWS)[0], group.meter.sent_bytes)
    dist.barrier()
    group.close()
    return Run(PYTORCH, rate, seed, noted.losses, noted.per_step)
