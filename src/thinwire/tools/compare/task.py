"""What is to be done: the settings of a comparison, checked before any process starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.errors import ConfigError
from thinwire.methods.registry import parse

Optimizer = Literal["sgd", "adam"]

# What PyTorch itself brings. Only a lab can slow these down: they do not go through thinwire's channel.
PYTORCH = ("pytorch", "pytorch-fp16", "pytorch-powersgd")

HANDFUL = ("dense", "fp16", "qsgd(bits=4)", "topk(ratio=0.01)", "powersgd(rank=2)", "pqasgd(every=8, bits=4)")
"""What runs when nobody says what to run: one method of each kind."""


@dataclass(frozen=True)
class Task:
    """One method with one seed: all that a worker process needs to know."""

    method: str
    seed: int
    model: str
    hidden: tuple[int, ...]
    data: str
    batch: int
    learning_rate: float
    optimizer: Optimizer
    steps: int
    evaluate_every: int
    target: float | None
    link: str


@dataclass(frozen=True)
class Recipe:
    """Settings with which a model learns, unless others are asked for."""

    batch: int
    learning_rate: float
    optimizer: Optimizer
    steps: int


RECIPES = {
    "mlp": Recipe(32, 0.1, "sgd", 300),
    "cnn": Recipe(32, 0.1, "sgd", 300),
    "resnet20": Recipe(32, 0.1, "sgd", 300),
    "lstm": Recipe(16, 0.004, "adam", 300),
    "transformer": Recipe(16, 0.002, "adam", 300),
}


def line_up(chosen: Sequence[str]) -> list[str]:
    """The methods to run, in their full form: `dense` (or PyTorch's own DDP) first, each one once.

    Every entry may hold several, with commas between them.
    """
    wanted = [part for text in chosen for part in split(text)] or list(HANDFUL)
    full = [text if text in PYTORCH else str(parse(text)) for text in wanted]
    baseline = "pytorch" if "pytorch" in full else "dense"
    return [baseline, *(text for text in dict.fromkeys(full) if text != baseline)]


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
