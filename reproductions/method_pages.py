"""docs/methods/: a page for each method, from its docstring, and how it did on digits, as measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproductions import NAMES, find
from thinwire.tools.catalogue.descriptions import Description, all_methods

COMMAND = "make pages"
NOTE = f"Made by `{COMMAND}`; do not edit."
HEADER = (
    "| method | accuracy | to dense | payload | rounds | sent | of dense |",
    "|---|---|---|---|---|---|---|",
)


def write_pages(folder: Path, digits: Mapping[str, Any] | None) -> list[Path]:
    """Write README.md and a page for each method; `digits`: from `benchmarks digits --json`."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, text in pages(digits).items():
        written.append(folder / name)
        written[-1].write_text(text)
    return written


def pages(digits: Mapping[str, Any] | None) -> dict[str, str]:
    """Markdown by file name."""
    described = sorted(all_methods(), key=lambda one: one.name)
    return {"README.md": _index(described, digits)} | {
        f"{one.name}.md": _page(one, digits) for one in described
    }


def _index(described: Sequence[Description], digits: Mapping[str, Any] | None) -> str:
    lines = ["# Methods", "", NOTE, "", "Not sure which one? See [choosing](../choosing.md).", ""]
    for kind, title, about in (
        ("exchange", "Averaging gradients in every step", "bytes per step"),
        ("schedule", "Periodic averaging of parameters", "bytes per step, on average"),
    ):
        lines += [f"## {title}", "", f"| method | what it does | {about} |", "|---|---|---|"]
        lines += [
            f"| [{one.name}]({one.name}.md) | {_cell(one.summary)} | `{_cell(one.bytes)}` |"
            for one in described
            if one.kind == kind
        ]
        lines.append("")
    lines += [
        "Bytes are what a worker hands over for a tensor of n entries, frame headers apart, between few "
        "workers; k entries are sent, `index_bytes(n, k)` is the shortest code of their places.",
        "",
    ]
    return "\n".join([*lines, *(_results(digits) if digits is not None else ())])


def _page(one: Description, digits: Mapping[str, Any] | None) -> str:
    lines = [f"# {one.name}", "", NOTE, "", one.summary, "", f"    {one.call}", ""]
    lines += [f"- Guarantees: {one.guarantees}."]
    lines += [f"- Limits: {one.limits}."] if one.limits != "-" else []
    lines += [f"- Bytes per step: `{one.bytes}`."]
    if one.kind == "schedule":
        lines.append("- A schedule: see [periodic averaging](../periodic.md).")
    lines += [f"- Reproduced: {_reproductions(one.name)}."] if _reproductions(one.name) else []
    lines += ["", "```text", one.text, "```", ""]
    if one.family:
        lines += ["## The family", "", "```text", one.family, "```", ""]
    return "\n".join([*lines, *_measured(one, digits)])


def _reproductions(method: str) -> str:
    """Links to those that are about this method."""
    about = [name for name in NAMES if method in find(name).methods]
    return ", ".join(f"[{name}](../reproductions.md#{name})" for name in about)


def _measured(one: Description, digits: Mapping[str, Any] | None) -> list[str]:
    if digits is None:
        return []
    rows: Sequence[Mapping[str, Any]] = digits["results"]
    own = [row for row in rows if _name(row) == one.name]
    if not own:
        return ["## Measured", "", f"Not in the table of `{digits['command']}`.", ""]
    dense = rows[0]
    shown = own if one.name == "dense" else [dense, *own]
    lines = ["## Measured", "", _about(digits), "", *HEADER]
    return [*lines, *(_row(row, dense) for row in shown), ""]


def _results(digits: Mapping[str, Any]) -> list[str]:
    rows: Sequence[Mapping[str, Any]] = digits["results"]
    return [
        "## On handwritten digits",
        "",
        _about(digits),
        "",
        *HEADER,
        *(_row(r, rows[0]) for r in rows),
        "",
    ]


def _about(digits: Mapping[str, Any]) -> str:
    seeds = digits["seeds"]
    return (
        f"`{digits['command']}`: a network of 85,002 parameters, {digits['workers']} workers, "
        f"{digits['steps']} steps of SGD (learning rate 0.2, no momentum), every method at its defaults, "
        f"{'one seed' if seeds == 1 else f'mean of {seeds} seeds'}. "
        "One of the 360 test images is 0.3 points. Bytes are per step and worker."
    )


def _row(row: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    return (
        f"| `{row['method']}` | {100 * row['accuracy']:.1f} % | "
        f"{100 * (row['accuracy'] - dense['accuracy']):+.1f} | {row['payload']:,.0f} | {row['rounds']:.3g} | "
        f"{row['sent']:,.0f} | {row['ratio']:.4f} |"
    )


def _name(row: Mapping[str, Any]) -> str:
    return str(row["method"]).partition("(")[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    root = Path(__file__).parents[1]
    digits = json.loads((root / "src/thinwire/predict/digits.json").read_text())
    write_pages(root / "docs/methods", digits)


if __name__ == "__main__":
    main()
