"""The docstring of a method in parts: summary, explanation, options, differences from the paper."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

_OPTION = re.compile(r"    (\w+): (.*)")
_PARSED = re.compile(r'parse\("(.*?)"\)')


@dataclass
class Docstring:
    """Paragraphs of the explanation that are indented are formulas or code."""

    summary: str = ""
    explanation: list[str] = field(default_factory=list[str])
    options: dict[str, str] = field(default_factory=dict[str, str])
    example: str = ""
    """The method string that the example parses, if it parses one."""
    differences: str = ""


def read(cls: type) -> Docstring:
    summary, *paragraphs = inspect.cleandoc(cls.__dict__.get("__doc__") or "").split("\n\n")
    found = Docstring(one_line(summary))
    for paragraph in paragraphs:
        header, _, rest = paragraph.partition(":")
        if header == "Args":
            found.options = _options(rest)
        elif header == "Differences from the paper":
            found.differences = one_line(rest[:2].upper() + rest[2:])
        elif header == "Example":
            found.example = next(iter(_PARSED.findall(rest)), "")
        else:
            found.explanation.append(paragraph if paragraph.startswith(" ") else one_line(paragraph))
    return found


def _options(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in text.strip("\n").splitlines():
        option = _OPTION.fullmatch(line)
        if option:
            name, found[option[1]] = option[1], option[2]
        else:
            found[name] += " " + line.strip()
    return found


def one_line(text: str) -> str:
    return " ".join(text.split())
