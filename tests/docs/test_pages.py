"""docs/methods is what the methods say about themselves, and they say enough."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from reproductions.method_pages import COMMAND, FAMILIES, pages
from tests.laws.cohort import Cohort
from thinwire import parse
from thinwire.tools.catalogue.descriptions import WIDTH, Description, all_methods

ROOT = Path(__file__).parents[2]
DIGITS = json.loads((ROOT / "src/thinwire/predict/digits.json").read_text())
PAGES = pages(DIGITS)
METHODS = {one.name: one for one in all_methods()}
# In this order; a page may lack those in brackets.
SECTIONS = (
    "Use it when",
    "Do not use it when",
    "Usage",
    "Formula",
    "Cost",
    "Guarantees",
    "(Limits)",
    "Options",
    "(Reference)",
    "(Differences from the paper)",
    "(Reproduced)",
    "Measured",
)

each = pytest.mark.parametrize("one", METHODS.values(), ids=METHODS)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_committed_page_is_up_to_date(name: str) -> None:
    committed = ROOT / "docs/methods" / name
    assert committed.is_file(), f"run: {COMMAND}"
    assert committed.read_text() == PAGES[name], f"run: {COMMAND}"


def test_no_page_of_a_method_that_is_gone() -> None:
    assert {path.name for path in (ROOT / "docs/methods").glob("*.md")} == set(PAGES)


@each
def test_a_page_begins_with_a_sentence_and_has_all_sections_in_order(one: Description) -> None:
    title, _, summary, *_ = PAGES[f"{one.name}.md"].splitlines()
    assert title == f"# {one.name}"
    assert summary.endswith(".")
    assert ". " not in summary
    found = re.findall(r"^## (.*)$", PAGES[f"{one.name}.md"], re.MULTILINE)
    found = ["Formula" if title == "How it works" else title for title in found]
    wanted = [title.strip("()") for title in SECTIONS if title[0] != "(" or title.strip("()") in found]
    assert found == wanted


@each
def test_a_method_says_when_to_use_it_and_when_not(one: Description) -> None:
    for advice in (one.use_when, one.avoid_when):
        assert advice.endswith(".")
        assert len(advice.split()) >= 10
        assert len(re.findall(r"[.?!](?: |$)", advice)) <= 3, "one or two sentences, at most three"
        for named in re.findall(r"`([a-z0-9]+(?:\([^`]*\))?)`", advice):
            if named not in one.options:
                parse(named)


def test_no_two_methods_have_the_same_advice_or_summary() -> None:
    for texts in (
        [advice for one in METHODS.values() for advice in (one.use_when, one.avoid_when)],
        [one.summary for one in METHODS.values()],
    ):
        assert [text for text, count in Counter(texts).items() if count > 1] == []


@each
def test_a_method_says_what_it_costs_and_what_every_option_means(one: Description) -> None:
    assert one.bytes != "-"
    assert one.rounds
    assert one.compute
    assert one.memory
    assert list(one.meanings) == list(one.options)
    assert all(meaning.endswith(".") for meaning in one.meanings.values()), one.meanings
    assert one.family in FAMILIES
    assert (one.family == "combining") or any(part.startswith(" ") for part in one.explanation), "a formula"


@each
def test_the_description_fits_a_terminal(one: Description) -> None:
    assert [line for line in one.text.splitlines() if len(line) > WIDTH] == []


@each
def test_the_usage_is_python_and_names_the_method(one: Description) -> None:
    code = PAGES[f"{one.name}.md"].split("```python\n")[1].split("```")[0]
    ast.parse(code)
    (quoted,) = re.findall(r'"(.*)"', code)
    assert parse(quoted).name == one.name


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    "name",
    [
        one.name
        for one in METHODS.values()
        if one.kind == "exchange" and one.family not in ("lazy", "combining")
    ],
)
def test_the_rounds_are_those_that_are_metered(name: str, size: int) -> None:
    """The text names the rounds of a gather first, then those of the reduction for many ranks."""
    cohort = Cohort(METHODS[name].usual, size, {"weight": (512, 300)})
    cohort.average(cohort.inputs(0))
    stated = [int(number) for number in re.findall(r"\b\d+\b", METHODS[name].rounds)]
    many = size >= getattr(parse(name), "two_shots_from", 5)
    assert cohort.driver.meters[0].rounds in (stated if many else stated[:1])


def test_links_between_the_pages_lead_somewhere() -> None:
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "examples/README.md"]:
        for part in path.read_text().split("](")[1:]:
            target = part.split(")")[0].split("#")[0]
            if target and "://" not in target:
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"
