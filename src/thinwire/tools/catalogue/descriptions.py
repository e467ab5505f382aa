"""What there is to say about each method: from its fields, its traits, its docstring and its formula."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from thinwire.core.config import Configured
from thinwire.core.exchange import Exchange
from thinwire.methods.registry import list_methods, list_schedules


@dataclass(frozen=True)
class Description:
    """One method at its defaults."""

    name: str
    kind: Literal["exchange", "schedule"]
    call: str
    summary: str
    options: dict[str, Any]
    traits: dict[str, Any]
    bytes: str
    reference: str
    text: str
    """The whole docstring."""
    family: str
    """What the methods of its family have in common, with their options."""

    @property
    def relied_on(self) -> str:
        if self.kind == "schedule":
            return "consensus after every meeting"
        return ", ".join(key for key, value in self.traits.items() if value is True) or "-"


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
        options=instance.options(),
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
