"""Each method in words: from its fields, its traits, its docstring and its class attributes."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from thinwire.averaging.base import Schedule
from thinwire.core import Layout
from thinwire.core.config import Configured, text_of
from thinwire.core.exchange import Exchange
from thinwire.methods.registry import list_methods, list_schedules, to_json
from thinwire.tools.catalogue import docstrings
from thinwire.tools.catalogue.docstrings import one_line

WIDTH = 100
GUARANTEES: dict[tuple[str, object], tuple[str, str]] = {
    ("consensus", True): ("same result on all ranks", "All ranks get the same result, bit for bit."),
    ("unbiased", True): ("unbiased", "It is unbiased: the expected result is the exact mean."),
    ("conserves", True): (
        "nothing is lost",
        "Nothing is lost: what is not sent in this step stays in the residual and is sent later.",
    ),
    ("elementwise", True): (
        "elementwise",
        "An entry of the result depends only on the same entry of the gradients.",
    ),
    ("single_mean", True): ("no state", "It keeps no state: there is nothing to save or to restore."),
    ("payload", "fixed"): (
        "fixed payload",
        "Every rank sends the same number of bytes in every step, known beforehand.",
    ),
}
"""What a trait with this value promises: in a table, and as a sentence."""
LIMITS: dict[tuple[str, object], tuple[str, str]] = {
    ("consensus", False): (
        "ranks may get different results",
        "The ranks get different results, so the replicas drift apart between two averages.",
    ),
    ("payload", "alternating"): (
        "payload changes from rank to rank or step to step",
        "The bytes change from rank to rank or from step to step; the largest number is known beforehand.",
    ),
    ("payload", "data-dependent"): (
        "payload depends on the data",
        "The number of bytes may depend on the gradients.",
    ),
    ("optimizer", "no momentum"): (
        "needs an optimizer without momentum",
        "The optimizer must have no momentum, because the method keeps it. Others are refused.",
    ),
    ("optimizer", "plain SGD"): (
        "needs plain SGD",
        "The theory needs plain SGD. Momentum or adaptive steps cause a warning.",
    ),
    ("optimizer", "Adam"): (
        "needs torch.optim.AdamW",
        "The optimizer must be `torch.optim.AdamW` (plain, foreach or fused), or Adam without weight decay. "
        "Others are refused.",
    ),
    ("scope", "bucket"): ("works on whole buckets", "It works on whole buckets."),
    ("scope", "model"): (
        "works on the whole model at once",
        "It works on the whole model at once, so communication begins after the last bucket is ready.",
    ),
}
"""What a user has to know about it, in the same two forms."""


@dataclass(frozen=True)
class Description:
    """One method at its defaults."""

    name: str
    kind: Literal["exchange", "schedule"]
    family: str
    call: str
    usual: str
    """The method string for an example of its use."""
    summary: str
    use_when: str
    avoid_when: str
    explanation: list[str]
    """Paragraphs; those that are indented are formulas or code."""
    options: dict[str, Any]
    """The default values as in JSON; `default_texts`: as in method strings; `meanings`: in words."""
    default_texts: dict[str, str]
    meanings: dict[str, str]
    traits: dict[str, Any]
    formula: str
    formula_note: str
    rounds: str
    compute: str
    memory: str
    host_waits: str
    reference: str
    differences: str
    warning: str

    @property
    def defaults(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.default_texts.items())

    @property
    def bytes(self) -> str:
        return ", ".join(filter(None, (self.formula, self.formula_note)))

    @property
    def guarantees(self) -> str:
        return ", ".join(short for short, _ in self.promises(GUARANTEES)) or "-"

    @property
    def limits(self) -> str:
        return ", ".join(short for short, _ in self.promises(LIMITS)) or "-"

    def promises(self, known: dict[tuple[str, object], tuple[str, str]]) -> list[tuple[str, str]]:
        if self.kind == "schedule" and known is GUARANTEES:
            short = "same result on all ranks after every sync round"
            return [
                (short, "Parameters are equal on all ranks, bit for bit, once their sync round is applied.")
            ]
        return [known[trait] for trait in self.traits.items() if trait in known]

    @property
    def text(self) -> str:
        """Everything but the facts, for a terminal of 100 columns."""
        advice = [f"Use it when: {self.use_when}", f"Do not use it when: {self.avoid_when}"]
        facts = {"Rounds per step": self.rounds, "Compute": self.compute, "Memory": self.memory}
        facts["Waits of the host for a GPU"] = self.host_waits
        cost = [f"{name}: {fact}" for name, fact in facts.items() if fact]
        options = [f"{name}: {meaning}" for name, meaning in self.meanings.items()]
        blocks = [_wrapped(self.summary), *map(_wrapped, advice if self.use_when else [])]
        blocks += [part if part.startswith(" ") else _wrapped(part) for part in self.explanation]
        blocks += ["\n".join(map(_wrapped, cost))]
        if options:
            blocks.append("Options:\n" + "\n".join(_wrapped(option, "    ") for option in options))
        blocks += [_wrapped(f"Differences from the paper: {self.differences}")] if self.differences else []
        return "\n\n".join(blocks)


def all_methods() -> list[Description]:
    known: list[type[Configured]] = [*list_methods().values(), *list_schedules().values()]
    return [describe(cls) for cls in known]


def describe(cls: type[Configured]) -> Description:
    instance, read = cls(), docstrings.read(cls)
    exchange = instance if isinstance(instance, Exchange) else None
    return Description(
        name=cls.name,
        kind="exchange" if exchange else "schedule",
        family=cls.family,
        call=repr(instance),
        usual=read.example or str(instance),
        summary=read.summary,
        use_when=one_line(cls.use_when),
        avoid_when=one_line(cls.avoid_when),
        explanation=read.explanation,
        options=json.loads(to_json(instance))["options"],
        default_texts={key: text_of(value) for key, value in instance.options().items()},
        meanings=_meanings(cls),
        traits=asdict(exchange.traits) if exchange else {"consensus": True},
        formula=cls.formula,
        formula_note=one_line(cls.formula_note),
        rounds=one_line(cls.rounds_per_step),
        compute=one_line(cls.compute),
        memory=_memory(instance),
        host_waits=str(instance.host_waits),
        reference=one_line(cls.reference),
        differences=read.differences,
        warning=exchange.warning or "" if exchange else "",
    )


def _meanings(cls: type[Configured]) -> dict[str, str]:
    """What each option means: as the class says, or the nearest of its bases."""
    known = [docstrings.read(base).options for base in cls.__mro__]
    return {f.name: next((one[f.name] for one in known if f.name in one), "") for f in fields(cls)}


def _memory(instance: Configured) -> str:
    """State besides the optimizer's, for a large float32 matrix."""
    if instance.family == "combining":
        used = [value for value in instance.options().values() if isinstance(value, Exchange)]
        own = _state_bytes(instance) - sum(map(_state_bytes, used)) if isinstance(instance, Exchange) else 0
        return (
            f"{own:.0f} bytes per parameter, and " if own >= 1 else ""
        ) + "the state of the methods it uses"
    if isinstance(instance, Schedule):
        anchor = "4 bytes per parameter for the last common model"
        velocity = ", 4 for the outer momentum" if instance.outer.momentum else ""
        inner = _state_bytes(instance.inner)
        return anchor + velocity + (f", {inner:.0f} for the state of the exchange" if inner else "")
    assert isinstance(instance, Exchange)
    count = _state_bytes(instance)
    return f"{count:.0f} bytes of state per parameter" if count else "no state"


def _state_bytes(exchange: Exchange) -> float:
    layout = Layout.of([("weight", (1024, 1024))])
    state = exchange.init(layout)
    tensors = (state.coordinates() | state.by_layout()).values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / layout.numel


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "    " * bool(indent))
