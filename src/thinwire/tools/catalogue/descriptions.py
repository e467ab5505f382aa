"""What there is to say about each method: from its fields, its traits, its docstring and its formula."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from thinwire.core.config import Configured, text_of
from thinwire.core.exchange import Exchange
from thinwire.methods.registry import list_methods, list_schedules, to_json

GUARANTEES: dict[tuple[str, object], str] = {
    ("consensus", True): "same result on all ranks",
    ("unbiased", True): "unbiased",
    ("conserves", True): "nothing is lost",
    ("elementwise", True): "elementwise",
    ("single_mean", True): "no state",
    ("payload", "fixed"): "fixed payload",
}
"""What a trait with this value promises."""
LIMITS: dict[tuple[str, object], str] = {
    ("consensus", False): "ranks may get different results",
    ("payload", "alternating"): "payload changes from rank to rank or step to step",
    ("payload", "data-dependent"): "payload depends on the data",
    ("optimizer", "no momentum"): "needs an optimizer without momentum",
    ("optimizer", "plain SGD"): "needs plain SGD",
    ("scope", "bucket"): "works on whole buckets",
    ("scope", "model"): "works on the whole model at once",
}
"""What a user has to know about it."""


@dataclass(frozen=True)
class Description:
    """One method at its defaults."""

    name: str
    kind: Literal["exchange", "schedule"]
    call: str
    summary: str
    options: dict[str, Any]
    """As JSON has them; `defaults`: as text."""
    defaults: str
    traits: dict[str, Any]
    bytes: str
    reference: str
    text: str
    """The whole docstring."""
    family: str
    """What the methods of its family have in common, with their options."""

    @property
    def guarantees(self) -> str:
        if self.kind == "schedule":
            return "same result on all ranks after every sync round"
        return self._phrases(GUARANTEES)

    @property
    def limits(self) -> str:
        return self._phrases(LIMITS)

    def _phrases(self, known: dict[tuple[str, object], str]) -> str:
        return ", ".join(known[trait] for trait in self.traits.items() if trait in known) or "-"


def all_methods() -> list[Description]:
    known: list[type[Configured]] = [*list_methods().values(), *list_schedules().values()]
    return [describe(cls) for cls in known]


def describe(cls: type[Configured]) -> Description:
    instance = cls()
    text = inspect.cleandoc(cls.__doc__ or "")
    exchange = isinstance(instance, Exchange)
    return Description(
        name=cls.name,
        kind="exchange" if exchange else "schedule",
        call=repr(instance),
        summary=text.splitlines()[0] if text else "",
        options=json.loads(to_json(instance))["options"],
        defaults=", ".join(f"{key}={text_of(value)}" for key, value in instance.options().items()),
        traits=asdict(instance.traits) if exchange else {"consensus": True},
        bytes=", ".join(filter(None, (cls.formula, cls.formula_note))),
        reference=cls.reference,
        text=text,
        family=_family(cls),
    )


def section(text: str, name: str) -> str:
    """The paragraph of a docstring that begins with this word and a colon."""
    match = re.search(rf"^{re.escape(name)}:[ \n](.*?)(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return match[1].strip() if match else ""


def _family(cls: type[Configured]) -> str:
    for base in cls.__mro__[1:]:
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        if "of this family" in text or "of all schedules" in text:
            return text
    return ""
