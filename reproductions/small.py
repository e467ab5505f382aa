"""Workloads small enough for hundreds of workers in one process: halved images, short rows of text."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from reproductions.cohort import Recipe
from reproductions.parts import Context
from thinwire.tools.workloads import Dataset
from thinwire.tools.workloads.data import cifar10, digits, synthetic, text

LENGTH = 32
"""Characters of a row."""
ROWS = 256
"""Of a step, of all workers together: the work of a step hardly depends on the number of workers."""
TEST_ROWS = 4000
Workloads = dict[str, tuple[Recipe, Dataset]]


def halved(context: Context) -> Dataset:
    """CIFAR-10 with images of 16 x 16: means of four pixels. Digits for a smoke run."""
    return digits() if context.quick or not context.has_data else _halved(context.data / "cifar10")


@lru_cache(maxsize=1)
def _halved(folder: Path) -> Dataset:
    data, small = cifar10(folder), torch.nn.functional.avg_pool2d
    return replace(
        data, name="cifar10 16x16", inputs=small(data.inputs, 2), test_inputs=small(data.test_inputs, 2)
    )


def short_text(context: Context) -> Dataset:
    """Tiny Shakespeare by rows of 32 characters. A made-up text for a smoke run."""
    real = context.has_data and not context.quick
    return _short(context.data / "tinyshakespeare" / "input.txt" if real else None)


@lru_cache(maxsize=1)
def _short(path: Path | None) -> Dataset:
    data = synthetic() if path is None else text(path)

    def cut(rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(-1, LENGTH)

    return replace(
        data,
        name=f"{data.name} by {LENGTH}",
        inputs=cut(data.inputs),
        targets=cut(data.targets),
        test_inputs=cut(data.test_inputs),
        test_targets=cut(data.test_targets),
    )


def workloads(context: Context) -> Workloads:
    """A residual network, an LSTM and a transformer; rates suit dense training with momentum 0.9.

    The residual network has norms of groups: a worker's batch has 1 to 16 images.
    """
    steps, rows = (6, 16) if context.quick else (480, ROWS)
    characters, photos = short_text(context), halved(context)
    base = Recipe("transformer", 1, steps, rows, momentum=0.9, cosine=True, warm_up=steps // 20)
    photo_steps = steps if context.quick else 200
    return {
        "transformer": (replace(base, hidden=(64, 64), learning_rate=0.2), characters),
        "LSTM": (replace(base, model="lstm", hidden=(64, 64), learning_rate=1.0), characters),
        "ResNet-20": (
            replace(
                base,
                model="resnet20",
                steps=photo_steps,
                learning_rate=0.03,
                warm_up=photo_steps // 20,
                group_norm=True,
            ),
            photos,
        ),
    }


def shared_by(recipe: Recipe, workers: int) -> Recipe:
    """The same rows per step, or nearly, shared by so many workers."""
    return replace(recipe, workers=workers, batch=max(1, recipe.batch * recipe.workers // workers))
