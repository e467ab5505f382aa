"""The page of methods: what each one is, from its docstring, and how it did on digits, as measured."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from thinwire.registry import methods, schedules


def methods_page(digits: Mapping[str, Any] | None) -> str:
    """Markdown; `digits` is what `thinwire demo --json` wrote."""
    lines = ["# Methods", ""]
    lines += ["Made by `thinwire methods --page`; do not edit.", ""]
    if digits is not None:
        lines += _results(digits)
    for name, cls in sorted(methods().items()):
        instance = cls()
        relied = [key for key, value in asdict(instance.traits).items() if value is True]
        lines += [
            f"## {name}",
            "",
            f"    {instance!r}",
            "",
            f"Traits: {', '.join(relied) or 'none'}.",
            "",
            "```text",
            inspect.cleandoc(cls.__doc__ or ""),
            "```",
            "",
        ]
    for name, schedule in sorted(schedules().items()):
        lines += [
            f"## {name}",
            "",
            f"    {schedule()!r}",
            "",
            "A schedule: parameters are averaged from time to time (see periodic.md). Replicas are equal after "
            "every sync.",
            "",
            "```text",
            inspect.cleandoc(schedule.__doc__ or ""),
            "```",
            "",
        ]
    return "\n".join(lines)


def _results(digits: Mapping[str, Any]) -> list[str]:
    rows: Sequence[Mapping[str, Any]] = digits["results"]
    dense = rows[0]["accuracy"]
    lines = [
        "## On handwritten digits",
        "",
        f"`{digits['command']}`: a network of 84,746 weights, {digits['workers']} workers, {digits['steps']} "
        f"steps of SGD (learning rate 0.2, no momentum), every method at its defaults, mean of "
        f"{digits['seeds']} seeds. "
        "One of the 360 test images is 0.3 points. Bytes are per step and worker.",
        "",
        "| method | accuracy | to dense | payload | rounds | sent | of dense |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row['method']}` | {100 * row['accuracy']:.1f} % | {100 * (row['accuracy'] - dense):+.1f} | "
        f"{row['payload']:,.0f} | {row['rounds']:.3g} | {row['sent']:,.0f} | {row['ratio']:.4f} |"
        for row in rows
    ]
    return [*lines, ""]
