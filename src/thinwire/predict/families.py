"""Periodic averaging at other periods than those in our table of a transformer.

Rows that differ only in `every` and `fragments` are a family. A setting of a family that was not measured
itself is judged by a row, under these rules:

1. The row has the same or a larger `every`, and may be recommended itself. The setting synchronises at least
   as often, so it should train no worse.
2. `every` is not smaller than the smallest one that was measured in the family.
3. A row with fragments stands for settings with any number of them, and without: every result is one step
   old, however many there are. A row without fragments stands for settings with them only if the table has
   two rows of this schedule that differ in nothing but fragments. What fragments cost there, at most, is
   added to the row's loss, and the sum must be close enough to `dense`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from thinwire.averaging.base import PeriodOptions
from thinwire.core.config import Configured
from thinwire.methods.registry import parse
from thinwire.predict import language

HIDDEN = 0.05
"""The wire is hidden if a step takes at most this part longer than computing alone."""


class Standing(NamedTuple):
    """What our table says about a setting: the row that stands for it, and how far that ended behind."""

    row: str
    behind: float
    recovered: float


class Cost(NamedTuple):
    """How much more a row with fragments is behind than the same without, and how much less it recovers."""

    behind: float
    recovered: float


@dataclass(frozen=True)
class Measured:
    """A row of the table."""

    method: PeriodOptions
    behind: float
    recovered: float | None

    def stands_for(self, setting: PeriodOptions, cost: Cost | None) -> Standing | None:
        """What this row says about the setting, if fragments cost so much."""
        extra = cost if setting.fragments > 1 and self.method.fragments == 1 else Cost(0.0, 0.0)
        if extra is None or self.recovered is None or self.method.period < setting.period:
            return None
        found = Standing(str(self.method), self.behind + extra.behind, self.recovered - extra.recovered)
        close = found.behind <= language.CLOSE_ENOUGH and found.recovered >= language.LEAST_RECOVERED
        return found if close else None


@dataclass(frozen=True)
class Family:
    """The settings of one schedule that differ only in `every` and `fragments`."""

    schedule: PeriodOptions
    rows: tuple[Measured, ...]
    fragments_cost: Cost | None

    def standing(self, setting: PeriodOptions) -> Standing | None:
        """By its own row, or the one with the nearest period; None if no row stands for this setting."""
        if setting.period < min(row.method.period for row in self.rows):
            return None
        own = [row for row in self.rows if row.method == setting]
        ordered = own or sorted(self.rows, key=lambda row: (row.method.period, row.behind))
        found = (row.stands_for(setting, self.fragments_cost) for row in ordered)
        return next((each for each in found if each is not None), None)

    def settings(self, tensors: int, *, spread: bool) -> list[str]:
        """Those that a row stands for, by `every`: in as many fragments as there are steps, or in one piece.

        A fragment has a tensor or more.
        """
        periods = [row.method.period for row in self.rows]
        made = [
            _at(self.schedule, every, min(every, tensors) if spread else 1)
            for every in range(min(periods), max(periods) + 1)
        ]
        found = [each for each in made if (each.fragments > 1) == spread]
        return [str(each) for each in found if self.standing(each) is not None]


def families() -> list[Family]:
    """Of our table of a transformer trained with AdamW."""
    recovered = language.recovered()
    rows = [
        Measured(method, nats, recovered.get(text))
        for text, nats in language.behind().items()
        if isinstance(method := parse(text), PeriodOptions) and _alike(method) is not None
    ]
    groups: dict[PeriodOptions, list[Measured]] = {}
    for row in rows:
        groups.setdefault(cast(PeriodOptions, _alike(row.method)), []).append(row)
    return [
        Family(
            schedule, tuple(of), _fragments_cost([row for row in rows if type(row.method) is type(schedule)])
        )
        for schedule, of in groups.items()
    ]


def standing(method: Configured) -> Standing | None:
    """What our table says about a setting of periodic averaging; None if nothing that recommends it."""
    alike = _alike(method)
    for family in families() if alike is not None else ():
        if family.schedule == alike:
            return family.standing(cast(PeriodOptions, method))
    return None


def same_family(one: Configured, other: Configured) -> bool:
    """Whether two schedules differ at most in `every` and `fragments`."""
    return _alike(one) is not None and _alike(one) == _alike(other)


def more_often(one: str, other: str) -> bool:
    """Whether it is the same schedule with a shorter period."""
    return same_family(parse(one), parse(other)) and _shorter(one, other)


def hiding(settings: Sequence[str], shows: Callable[[str], float]) -> str:
    """The first setting that hides the wire, which later ones hide better; the last if none does.

    `shows` says what part of computing alone a step takes longer.
    """
    first, last = 0, len(settings) - 1
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if shows(settings[middle]) <= HIDDEN else (middle + 1, last)
    return settings[first]


def for_the_link(family: Family, tensors: int, shows: Callable[[str], float]) -> str | None:
    """The setting with the smallest `every` that hides the wire; if none does, the one that shows it least.

    None if the table supports no setting of the family.
    """
    found: list[str] = []
    for spread in (True, False):
        settings = family.settings(tensors, spread=spread)
        if found and shows(found[0]) <= HIDDEN:  # only a shorter period would be better
            settings = [each for each in settings if _shorter(each, found[0])]
        if settings:
            found.append(hiding(settings, shows))
    hidden = [each for each in found if shows(each) <= HIDDEN]
    return hidden[-1] if hidden else min(found, key=shows, default=None)


def _shorter(one: str, other: str) -> bool:
    return cast(PeriodOptions, parse(one)).period < cast(PeriodOptions, parse(other)).period


def _alike(method: Configured) -> PeriodOptions | None:
    """The schedule without its `every` and fragments; None if it is none, or has an overlap of its own."""
    if not isinstance(method, PeriodOptions) or method.overlap is not None:
        return None
    return _at(method, 1, 1)


def _at(schedule: PeriodOptions, every: int, fragments: int) -> PeriodOptions:
    return replace(cast(Any, schedule), every=every, fragments=fragments)


def _fragments_cost(rows: Sequence[Measured]) -> Cost | None:
    """The most that fragments cost, of two rows that differ in nothing else; None without such rows."""
    whole = {row.method: row for row in rows if row.method.fragments == 1}
    pairs = [
        (whole[one], row)
        for row in rows
        if row.method.fragments > 1 and (one := _at(row.method, row.method.period, 1)) in whole
    ]
    found = [
        Cost(cut.behind - one.behind, one.recovered - cut.recovered)
        for one, cut in pairs
        if one.recovered is not None and cut.recovered is not None
    ]
    if not found:
        return None
    return Cost(max(0.0, *(each.behind for each in found)), max(0.0, *(each.recovered for each in found)))
