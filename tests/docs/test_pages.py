"""docs/methods is what the docstrings say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproductions.method_pages import COMMAND, pages
from thinwire.tools.catalogue.descriptions import all_methods

ROOT = Path(__file__).parents[2]
DIGITS = json.loads((ROOT / "src/thinwire/predict/digits.json").read_text())
PAGES = pages(DIGITS)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_committed_page_is_up_to_date(name: str) -> None:
    committed = ROOT / "docs/methods" / name
    assert committed.is_file(), f"run: {COMMAND}"
    assert committed.read_text() == PAGES[name], f"run: {COMMAND}"


def test_no_page_of_a_method_that_is_gone() -> None:
    assert {path.name for path in (ROOT / "docs/methods").glob("*.md")} == set(PAGES)


def test_every_method_says_what_it_is_and_what_it_costs() -> None:
    for one in all_methods():
        assert one.summary.endswith("."), one.name
        assert one.bytes != "-", one.name
    named = {one.name for one in all_methods() if one.reference}
    assert {"topk", "qsgd", "powersgd", "dgc", "gspar", "pqasgd"} <= named


def test_links_between_the_pages_lead_somewhere() -> None:
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "examples/README.md"]:
        for part in path.read_text().split("](")[1:]:
            target = part.split(")")[0].split("#")[0]
            if target and "://" not in target:
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"
