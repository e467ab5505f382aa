"""What exchanges and schedules have in common: a frozen configuration with a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, cast


class HostWaits(NamedTuple):
    """How often the host waits for a GPU in a step, at most, besides once for each round of received frames.

    Once per bucket it waits for the commit: whether all numbers were finite.
    """

    per_bucket: int = 1
    per_tensor: int = 0
    per_rank: int = 0
    """For each rank whose payload is decoded."""
    why: str = ""
    """What the other waits are for."""

    def most(self, tensors: int, ranks: int) -> int:
        """In a bucket of so many tensors, with so many ranks."""
        return self.per_bucket + self.per_tensor * tensors + self.per_rank * ranks

    def __str__(self) -> str:
        parts = {"bucket": self.per_bucket, "tensor": self.per_tensor, "rank": self.per_rank}
        told = " and ".join(f"{times} per {what}" for what, times in parts.items() if times) or "none"
        return f"{told} ({self.why})" if self.why else told


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
    waits: ClassVar[HostWaits] = HostWaits()
    """How often the host waits for a GPU, without the methods in its options; tests count it."""
    reference: ClassVar[str] = ""
    """The paper."""

    @property
    def host_waits(self) -> HostWaits:
        """How often the host waits for a GPU, with the methods in its options."""
        return _longest(
            [self.waits, *(method.host_waits for method in _inside(list(self.options().values())))]
        )

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


def _inside(value: object) -> list[Configured]:
    """The methods in an option's value."""
    if isinstance(value, Configured):
        return [value]
    parts = cast("list[object]", value) if isinstance(value, list | tuple) else []
    return [method for part in parts for method in _inside(part)]


def _longest(waits: Sequence[HostWaits]) -> HostWaits:
    """The most of each kind."""
    most = [max(counts) for counts in zip(*(each[:3] for each in waits), strict=True)]
    return HostWaits(*most, why=", ".join(dict.fromkeys(each.why for each in waits if each.why)))


def text_of(value: object) -> str:
    """An option's value as it is written in a method string."""
    if isinstance(value, Configured):
        return str(value)
    if isinstance(value, tuple):
        parts = [text_of(part) for part in cast("tuple[object, ...]", value)]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return repr(value)
