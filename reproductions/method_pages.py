"""docs/methods/: a page for each method, from its docstring and class attributes, with measured results."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproductions import NAMES, find
from thinwire.tools.catalogue.descriptions import GUARANTEES, LIMITS, Description, all_methods

COMMAND = "make pages"
NOTE = f"*Made by `{COMMAND}` from the source of the method; do not edit.*"
LINE = 110
"""The longest line of code, as for ruff."""
HEADER = (
    "| method | accuracy | to dense | payload | rounds | sent | of dense |",
    "|---|---|---|---|---|---|---|",
)
FAMILIES = {
    "dense": ("Whole gradients", "Every entry is sent, in full or in half precision."),
    "quantised": (
        "Quantised",
        "Every entry is sent with a few bits. From five ranks on the codes are averaged in two shots.",
    ),
    "sparse": (
        "Sparse",
        "Every rank selects its own entries. Gathered payloads grow with the number of workers, unless the "
        "entries are split among the ranks.",
    ),
    "shared": (
        "Sparse, with the same entries on all ranks",
        "Values are added on the way, so the cost hardly grows with the number of workers.",
    ),
    "approximate": ("Approximations of the whole gradient", "A few numbers stand for the whole gradient."),
    "lazy": ("Lazy", "A rank whose gradient has hardly changed does not send it again."),
    "combining": ("Combining methods", "Methods that use other methods."),
    "periodic": (
        "Periodic averaging",
        "Every rank trains by itself, and the replicas are averaged every few steps: see "
        "[periodic averaging](../periodic.md).",
    ),
    "other": ("Others", ""),
}
"""Title and explanation, in the order of the index."""
SYMBOLS = {
    "x_i": "the parameters of rank i",
    "theta": "the parameters",
    "g_i": "the gradient of rank i",
    "e_i": "the residual of rank i",
    "gamma": "the learning rate",
    "W": "the number of ranks",
    "n": "the number of entries",
    "out": "the result",
}
TERMS = {
    "k": "k entries are sent.",
    "index_bytes": "`index_bytes(n, k)` is the shortest code of k indices below n.",
    "rice_bytes": "`rice_bytes(k)` is the Rice code of k positions: about log2(n/k) + 1.5 bits each, "
    "and one more with `signs`.",
    "head": "`head` is 4 bytes for 1/lambda and 1 to 5 for each count.",
    "itemsize": "`itemsize` is 4 for float32.",
    "cols": "`rows` and `cols` are those of the gradient as a matrix.",
    "n": "n is the number of entries of a tensor.",
}


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
    described = all_methods()
    return {"README.md": _index(described, digits)} | {
        f"{one.name}.md": _page(one, digits) for one in described
    }


# -- the index ---------------------------------------------------------------------------------------------


def _index(described: Sequence[Description], digits: Mapping[str, Any] | None) -> str:
    lines = ["# Methods", "", "Not sure which one? See [choosing](../choosing.md).", ""]
    for family, (title, about) in FAMILIES.items():
        members = [one for one in described if one.family == family]
        if members:
            lines += [f"## {title}", "", about, "", "| method | what it does |", "|---|---|"]
            lines += [f"| [{one.name}]({one.name}.md) | {_cell(_prose(one.summary))} |" for one in members]
            lines += [""]
    lines += [
        "With every method a step is a transaction: if a gradient is not finite on any rank, all ranks skip "
        "the step and keep their state.",
        "",
    ]
    lines += _results(digits) if digits is not None else []
    return "\n".join([*lines, NOTE, ""])


def _results(digits: Mapping[str, Any]) -> list[str]:
    rows: Sequence[Mapping[str, Any]] = digits["results"]
    table = [_row(row, rows[0]) for row in rows]
    return ["## On handwritten digits", "", _about(digits), "", *HEADER, *table, ""]


# -- a page ------------------------------------------------------------------------------------------------


def _page(one: Description, digits: Mapping[str, Any] | None) -> str:
    sections = {
        "Use it when": [_prose(one.use_when)],
        "Do not use it when": [_prose(one.avoid_when)],
        "Usage": _usage(one),
        "Formula" if _has_formula(one) else "How it works": _formula(one),
        "Cost": _cost(one),
        "Guarantees": [f"- {sentence}" for _, sentence in one.promises(GUARANTEES)],
        "Limits": [f"- {sentence}" for _, sentence in one.promises(LIMITS)],
        "Options": _options(one),
        "Reference": [f"{_prose(one.reference)}."] if one.reference else [],
        "Differences from the paper": [_prose(one.differences)] if one.differences else [],
        "Reproduced": _reproductions(one.name),
        "Measured": _measured(one, digits),
    }
    lines = [f"# {one.name}", "", _prose(one.summary), ""]
    for title, content in sections.items():
        lines += [f"## {title}", "", *content, ""] if any(content) else []
    return "\n".join([*lines, NOTE, ""])


def _usage(one: Description) -> list[str]:
    if one.kind == "schedule":
        code = [
            f'session = thinwire.attach(model, "{one.usual}", optimizer=optimizer)',
            "...  # your training loop",
            "session.finish()  # a last sync round",
        ]
    else:
        needs = {"no momentum": "without momentum", "plain SGD": "plain SGD", "Adam": "AdamW"}.get(
            one.traits["optimizer"]
        )
        arguments = f'ddp_model, "{one.usual}", optimizer=optimizer'
        code = [f"session = thinwire.attach({arguments})"]
        if len(code[0]) > LINE:
            code = ["session = thinwire.attach(", f"    {arguments}", ")"]
        if needs and len(code[0]) > 90:
            code = [f"# optimizer: {needs}", *code]
        elif needs:
            code = [f"{code[0]}  # {needs}"]
        code += ["...  # your training loop"]
        code += [] if one.traits["consensus"] else ["session.reconcile()  # before you save or evaluate"]
    lines = ["<!-- fragment -->", "```python", "import thinwire", "", *code, "```"]
    return [*lines, "", f"A warning is logged at the start: {_prose(one.warning)}."] if one.warning else lines


def _has_formula(one: Description) -> bool:
    return any(paragraph.startswith(" ") for paragraph in one.explanation)


def _formula(one: Description) -> list[str]:
    """Formulas and code as code blocks. The first is followed by its symbols."""
    lines: list[str] = []
    for paragraph in one.explanation:
        if paragraph.startswith(" "):
            symbols = [] if "```" in lines else [_symbols(paragraph), ""]
            lines += ["```text", *textwrap.dedent(paragraph).splitlines(), "```", "", *symbols]
        else:
            lines += [_prose(paragraph), ""]
    return lines[:-1]


def _symbols(formula: str) -> str:
    used = set(re.findall(r"[A-Za-z]+(?:_i)?", formula))
    used -= set() if "g_i + e_i" in formula else {"e_i"}  # without error feedback e_i is something else
    named = [f"`{symbol}` is {meaning}" for symbol, meaning in SYMBOLS.items() if symbol in used]
    return ", ".join(named).replace("is the parameters", "are the parameters") + "."


def _cost(one: Description) -> list[str]:
    formula, note = f"`{one.formula}`" if one.formula else "", _prose(one.formula_note)
    words = set(re.findall(r"\w+", one.formula)) - ({"k"} if "where k" in note else set())
    terms = " ".join(meaning for term, meaning in TERMS.items() if term in words)
    return [
        f"- Bytes per step: {', '.join(filter(None, (formula, note)))}. {terms}".rstrip(),
        f"- Rounds per step: {_prose(one.rounds)}.",
        f"- Compute: {_prose(one.compute)}.",
        f"- Memory: {one.memory}.",
        f"- Waits of the host for a GPU, at most: {_prose(one.host_waits)}; "
        "and one for each round of received payloads ([GPUs](../gpu.md)).",
    ]


def _options(one: Description) -> list[str]:
    rows = [
        f"| `{name}` | `{_cell(one.default_texts[name])}` | {_cell(_prose(meaning))} |"
        for name, meaning in one.meanings.items()
    ]
    return ["| option | default | meaning |", "|---|---|---|", *rows] if rows else ["None."]


def _reproductions(method: str) -> list[str]:
    """Links to those that are about this method."""
    about = [name for name in NAMES if method in find(name).methods]
    return [", ".join(f"[{name}](../reproductions.md#{name})" for name in about)]


def _measured(one: Description, digits: Mapping[str, Any] | None) -> list[str]:
    if digits is None:
        return []
    rows: Sequence[Mapping[str, Any]] = digits["results"]
    own = [row for row in rows if _name(row) == one.name]
    if not own:
        return [f"Not in the table of `{digits['command']}`."]
    shown = own if one.name == "dense" else [rows[0], *own]
    return [_about(digits), "", *HEADER, *(_row(row, rows[0]) for row in shown)]


def _about(digits: Mapping[str, Any]) -> str:
    seeds = digits["seeds"]
    return (
        f"`{digits['command']}`: a network of 85,002 parameters, {digits['workers']} workers, "
        f"{digits['steps']} steps of SGD (learning rate 0.2, no momentum), every method at its defaults, "
        f"{'one seed' if seeds == 1 else f'mean of {seeds} seeds'}. "
        "One of the 360 test images is 0.3 points. Bytes are per step and worker: the payload goes into the "
        "collectives, and `sent` leaves the network interface."
    )


def _row(row: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
    return (
        f"| `{row['method']}` | {100 * row['accuracy']:.1f} % | "
        f"{100 * (row['accuracy'] - dense['accuracy']):+.1f} | {row['payload']:,.0f} | {row['rounds']:.3g} | "
        f"{row['sent']:,.0f} | {row['ratio']:.4f} |"
    )


def _name(row: Mapping[str, Any]) -> str:
    return str(row["method"]).partition("(")[0]


def _prose(text: str) -> str:
    """Asterisks outside of code would become emphasis."""
    parts = text.split("`")
    return "`".join(part if number % 2 else part.replace("*", r"\*") for number, part in enumerate(parts))


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def main() -> None:
    root = Path(__file__).parents[1]
    digits = json.loads((root / "src/thinwire/predict/digits.json").read_text())
    write_pages(root / "docs/methods", digits)


if __name__ == "__main__":
    main()
