"""What exchanges and schedules have in common: a frozen configuration with a name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True)
class Configured:
    """Subclasses are frozen dataclasses with validated fields; strings, JSON and `repr` come from them."""

    name: ClassVar[str]

    def options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        """The method string: the main option and those that differ from their default."""
        told = [
            f"{f.name}={getattr(self, f.name)!r}"
            for number, f in enumerate(fields(self))
            if (number == 0 and f.metadata.get("main", True)) or getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(told)})" if told else self.name
