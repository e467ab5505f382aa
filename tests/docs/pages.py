"""What the pages contain: command lines, and blocks of Python."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BEGIN = r"(?:[A-Z_]+=\S+ )*(?:thinwire|torchrun|make|python(?= examples/)|python -m)"
_COMMAND = re.compile(rf"(\$ )?(?P<line>{_BEGIN} .+)$")
_INLINE = re.compile(rf"(?<!`)`({_BEGIN} [^`\n]+)`(?!`)")
_OTHER_LANGUAGES = {"python", "json", "toml", "diff", "text", "yaml"}
_BLOCK = re.compile(
    r"<!-- (?P<mark>setup|fragment|from (?P<file>\S+))(?P<hidden>.*?) ?-->\n|```python\n(?P<code>.*?)```",
    re.DOTALL,
)


def commands(text: str) -> list[str]:
    """Every command line of a page: lines of code blocks, and inline code that is a command."""
    found: list[str] = []
    language: str | None = None
    prose: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.lstrip().startswith("```"):
            language = line.strip().strip("`").strip() if language is None else None
            continue
        if language is None and not line.startswith("    "):
            prose.append(line)
            continue
        if language in _OTHER_LANGUAGES:
            continue
        whole = line.rstrip() if language is not None else line.strip()  # output is often indented
        while whole.endswith("\\"):
            whole = whole[:-1].rstrip() + " " + next(lines).strip()
        match = _COMMAND.match(re.split(r" {2,}#", whole)[0].rstrip())
        if match:
            found.append(match["line"])
    found += [match.strip() for match in _INLINE.findall("\n".join(prose))]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Block:
    """A block of Python: what it is for ("run", "fragment", "from"), and its code."""

    kind: str
    code: str
    file: str = ""


def blocks(text: str) -> list[Block]:
    """The blocks of a page in order. A comment before a block says if it is not to be run:

    `<!-- fragment -->` (only its syntax is checked) or `<!-- from FILE -->` (it must be part of that file).
    `<!-- setup ... -->` is code that is run and not shown.
    """
    found: list[Block] = []
    mark: re.Match[str] | None = None
    for match in _BLOCK.finditer(text):
        if match["code"] is None:
            mark = match
            if match["mark"] == "setup":
                found.append(Block("run", match["hidden"]))
                mark = None
        else:
            near = mark is not None and not text[mark.end() : match.start()].strip()
            kind = mark["mark"].split()[0] if mark is not None and near else "run"
            found.append(
                Block(kind, match["code"], (mark["file"] or "") if mark is not None and near else "")
            )
            mark = None
    return found
