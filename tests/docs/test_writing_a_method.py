"""The method of docs/writing-a-method.md is a method: registered, it obeys the laws and trains."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

import thinwire
from tests.laws import test_laws
from tests.laws.cohort import LINKS, SIZES, Cohort
from thinwire.core import Channel, Exchange, Traits, checks

PAGE = Path(__file__).parents[2] / "docs/writing-a-method.md"
METHODS = ("byturns(parts=4)", "byturns(parts=1)")
# What a law's other parameters range over; `unbiased` laws are for methods that say they are, and those
# `with_a_delay` for `delayed`.
RANGES = {
    "size": SIZES,
    "link": LINKS,
    "dtype": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "value": (float("nan"), float("inf")),
    "tensor": ("wide", "vector"),
}
LAWS = {
    name: law
    for name, law in vars(test_laws).items()
    if name.startswith("test_")
    and not any(kind in name for kind in ("unbiased", "with_a_delay"))
    and "method" in inspect.signature(law).parameters
}


@pytest.fixture(autouse=True)
def _registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's code as a module that an entry point names, as in its last section."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "page_of_a_method.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "page_of_a_method", raising=False)
    importlib.invalidate_caches()
    entry = importlib.metadata.EntryPoint("byturns", "page_of_a_method:ByTurns", "thinwire.methods")
    monkeypatch.setattr(
        "thinwire.methods.registry.entry_points", lambda group: [entry] if group == "thinwire.methods" else []
    )


def test_all_laws_are_found() -> None:
    assert len(LAWS) >= 9
    assert "test_conservation" in LAWS
    assert "test_non_finite_input_leaves_no_trace" in LAWS


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("method", METHODS)
def test_it_obeys_the_law(law: str, method: str, tmp_path: Path) -> None:
    function = LAWS[law]
    asked = [name for name in inspect.signature(function).parameters if name not in ("method", "tmp_path")]
    assert set(asked) <= set(RANGES), "a law with a parameter that this test does not know"
    given: list[dict[str, object]] = [{}]
    for name in asked:
        given = [{**one, name: value} for one in given for value in RANGES[name]]
    paths = {"tmp_path": tmp_path} if "tmp_path" in inspect.signature(function).parameters else {}
    for one in given:
        function(method, **one, **paths)


def test_a_wrong_option_says_so() -> None:
    with pytest.raises(thinwire.ConfigError, match="parts must be a whole number from 1 up, not 0"):
        thinwire.parse("byturns(parts=0)")
    with pytest.raises(thinwire.ConfigError, match="did you mean 'parts'"):
        thinwire.parse("byturns(part=2)")


def test_every_coordinate_comes_once_in_a_round() -> None:
    cohort = Cohort("byturns(parts=4)", 2, {"w": (5, 4)})
    ones = [{"w": torch.ones(5, 4)} for _ in range(2)]
    outputs = [cohort.average(ones)[0]["w"] for _ in range(4)]
    assert [int(out.count_nonzero()) for out in outputs] == [5, 5, 5, 5]
    assert [float(out.max()) for out in outputs] == [1.0, 2.0, 3.0, 4.0]


def test_the_page_names_everything_a_method_may_have_and_use() -> None:
    text = PAGE.read_text()
    hooks = [name for name in vars(Exchange) if not name.startswith("_")]
    inherited = ["name", "formula", "formula_note", "reference", "__post_init__"]
    inherited += ["family", "use_when", "avoid_when", "rounds_per_step", "compute", "waits", "host_waits"]
    helpers = [name for name, value in vars(checks).items() if inspect.isfunction(value) and name[0] != "_"]
    asked = [name for name in vars(Channel) if not name.startswith("_") and name != "commit"]
    fields = [*(field.name for field in dataclasses.fields(Traits)), "residual()", "momentum()"]
    for part in (*hooks, *inherited, *helpers, *fields, "replicated()", "own()"):
        assert f"`{part}`" in text, part
    for call in asked:
        assert call in text, call
