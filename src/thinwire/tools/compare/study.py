"""The grid of a study of sparse communication: which entries, whose indices, over what, with which feedback.

Eghlidi and Jaggi, "Sparse communication for training deep networks", 2020.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from thinwire.hosts.scripts import ALONE
from thinwire.tools.compare.records import Records

Rule = Literal["top-k", "random-k", "random block"]
RULES: tuple[Rule, ...] = ("top-k", "random-k", "random block")
Feedback = Literal["on", "off", "scaled"]
CONTROLS = ("dense", ALONE)
BOTH = (True, False)


@dataclass(frozen=True, order=True)
class Cell:
    """One configuration.

    Args:
        rule: which entries are sent.
        shared: all ranks send the same ones.
        whole: they are chosen in the whole model, not in each tensor.
        feedback: what becomes of the others: "on" adds them to the next gradient, "off" drops them, "scaled"
            drops them too and scales those that are sent by n/k.
        before: momentum comes before the exchange, not after it.
    """

    rule: Rule
    shared: bool
    whole: bool
    feedback: Feedback
    before: bool = False

    def method(self, ratio: float) -> str | None:
        """thinwire's method, if there is one."""
        options = f"ratio={ratio}, scope={'model' if self.whole else 'tensor'!r}"
        if self.rule == "top-k" and self.shared:
            return f"scalecom({options})" if self.feedback == "on" else None
        options += {"on": "", "off": ", feedback=False", "scaled": ", feedback=False"}[self.feedback]
        if self.rule == "top-k":
            return f"topk({options})"
        options += ", scale=None" if self.feedback == "off" else ""
        if self.rule == "random-k":
            return f"randomk({options}, shared={self.shared})"
        return f"randomblock({options})" if self.shared else None

    def row(self) -> tuple[str, ...]:
        """The values of the parameters in words."""
        return (
            self.rule,
            "shared" if self.shared else "own",
            "model" if self.whole else "layer",
            self.feedback,
            "before" if self.before else "after",
        )

    def __str__(self) -> str:
        return ", ".join(self.row())


COLUMNS = ("rule", "indices", "over", "feedback", "momentum")


def cells(*, scaled: bool = False, momenta: Sequence[bool] = (False,)) -> list[Cell]:
    """All configurations; with `scaled` also those of the random rules without feedback that scale by n/k."""
    feedback: tuple[Feedback, ...] = ("on", "off", "scaled") if scaled else ("on", "off")
    everything = itertools.product(RULES, BOTH, BOTH, feedback, momenta)
    return [Cell(*values) for values in everything if values[0] != "top-k" or values[3] != "scaled"]


# The parameter that changes, to which value, from which.
CHANGES: dict[str, tuple[str, object, object]] = {
    "error feedback on": ("feedback", "on", "off"),
    "scaled by n/k, no feedback": ("feedback", "scaled", "off"),
    "indices shared": ("shared", True, False),
    "layer by layer": ("whole", False, True),
    "momentum after": ("before", False, True),
}
Effects = dict[str, dict[Rule, list[float]]]


def effects(accuracies: Mapping[Cell, float]) -> Effects:
    """What each change of one parameter does, by rule: points of accuracy in every pair of cells."""
    found: Effects = {}
    for what, (name, value, other) in CHANGES.items():
        by_rule = found[what] = {rule: list[float]() for rule in RULES}
        for cell, accuracy in accuracies.items():
            pair = replace(cell, **{name: other})
            if getattr(cell, name) == value and pair in accuracies:
                by_rule[cell.rule].append(100 * (accuracy - accuracies[pair]))
    return found


def summary(points: Sequence[float]) -> str:
    """The median, and in how many pairs the change helps."""
    wins = sum(value > 0 for value in points)
    return f"{statistics.median(points):+.1f}, {wins} of {len(points)}" if points else "-"


def accuracies_of(records: Records, methods: Mapping[Cell, str]) -> dict[Cell, float]:
    """The mean over the seeds at the end; a run that diverged counts with its last test."""
    return {
        cell: statistics.fmean(run.accuracy for run in records.runs_of(method))
        for cell, method in methods.items()
    }
