"""What exchanges and schedules have in common: a frozen configuration with a name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast


@dataclass(frozen=True)
class Configured:
    """Subclasses are frozen dataclasses with validated fields; strings, JSON and `repr` come from them.

    A field may hold another method: `TopK(values=QSGD(bits=4))` is `topk(values=qsgd(bits=4))`.
    """

    name: ClassVar[str]
    family: ClassVar[str] = "other"
    """The group of related methods it belongs to."""
    use_when: ClassVar[str] = ""
    """When to take it: one or two plain sentences."""
    avoid_when: ClassVar[str] = ""
    """When to take something else."""
    formula: ClassVar[str] = "-"
    """The payload of a worker per step in bytes, for people to read and for tests to evaluate."""
    formula_note: ClassVar[str] = ""
    """What the formula omits, or when it holds."""
    rounds_per_step: ClassVar[str] = ""
    """How many collectives follow one another in a step."""
    compute: ClassVar[str] = ""
    """The work of a step besides communication, in words."""
    reference: ClassVar[str] = ""
    """The paper."""

    def options(self) -> dict[str, Any]:
        """The options and their values, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        """The method string: the main option and those that differ from their default."""
        told = [
            f"{f.name}={text_of(getattr(self, f.name))}"
            for number, f in enumerate(fields(self))
            if (number == 0 and f.metadata.get("main", True)) or getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(told)})" if told else self.name


def text_of(value: object) -> str:
    """An option's value as it is written in a method string."""
    if isinstance(value, Configured):
        return str(value)
    if isinstance(value, tuple):
        parts = [text_of(part) for part in cast("tuple[object, ...]", value)]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return repr(value)
