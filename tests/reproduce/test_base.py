"""Parts are computed once, whatever happens in between; claims and tables are what they were told."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from reproductions import Context, Outcome
from reproductions.base import described
from reproductions.cohort import Recipe
from thinwire.errors import ConfigError
from thinwire.tools.workloads.data import digits

CALLS: list[str] = []


class Found(msgspec.Struct):
    name: str
    losses: list[float]
    points: list[tuple[int, float | None]]


def work(name: str, factor: float = 1.0) -> Found:
    CALLS.append(name)
    return Found(name, [factor, float("inf")], [(1, None), (2, 0.1 + 0.2)])


def other(name: str) -> int:
    return len(name)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def context(tmp_path: Path) -> Context:
    return Context("x", data=None, quick=True, out=tmp_path)


def test_a_stopped_run_continues(tmp_path: Path) -> None:
    first = context(tmp_path)
    made = first.once(work, "a", factor=2.0)
    assert made == work("a", 2.0)
    (path,) = (first.folder / "parts").iterdir()
    path.with_suffix(".partial").write_bytes(b"killed while it wro")
    found = context(tmp_path).each({"one": partial(work, "a", factor=2.0), "two": partial(work, "b")})
    assert found == {"one": made, "two": work("b")}
    assert CALLS == ["a", "a", "b", "b"]
    assert context(tmp_path).once(work, "b") == found["two"]
    assert CALLS == ["a", "a", "b", "b"]


def test_another_argument_or_function_is_another_part(tmp_path: Path) -> None:
    run = context(tmp_path)
    assert run.once(work, "a").losses[0] == 1.0
    assert run.once(work, "a", 3.0).losses[0] == 3.0
    assert run.once(work, "a", factor=4.0).losses[0] == 4.0
    assert run.once(other, "a") == 1
    assert CALLS == ["a", "a", "a"]


def test_a_part_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    run = context(tmp_path)
    run.once(work, "a")
    (path,) = (run.folder / "parts").iterdir()
    good = path.read_bytes()
    for bad in (good[:-3], b"", msgspec.msgpack.encode({"call": "f", "value": 3})):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match="remove it to compute it again"):
            run.once(work, "a")
    run.once(other, "abc")
    (mine,) = (each for each in (run.folder / "parts").iterdir() if each != path)
    mine.write_bytes(msgspec.msgpack.encode({"call": "another()", "value": 3}))
    with pytest.raises(ConfigError, match=r"another\(\), not .*other"):
        run.once(other, "abc")


@dataclass(frozen=True)
class Setup:
    name: str
    folder: Path = field(repr=False)


def test_arguments_describe_themselves_or_are_refused(tmp_path: Path) -> None:
    assert described((1, 2.5, "a", None, True)) == "(1, 2.5, 'a', None, True)"
    assert described(Setup("s", tmp_path)) == "Setup(name='s')"
    assert described(digits()) == "digits 1437"
    assert "learning_rate=0.1" in described(Recipe("mlp"))
    for bad in (torch.ones(3), tmp_path, lambda: 3, (1, tmp_path)):
        with pytest.raises(TypeError, match="does not describe itself"):
            described(bad)


def test_progress_names_the_parts(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    run = Context("x", data=None, quick=True, out=tmp_path, progress=lambda *what: told.append(what))
    run.each({(4, "workers"): partial(other, "a"), "b": partial(other, "b")}, "bytes:")
    assert told == [("bytes: 4 workers", 0, 2), ("bytes: b", 1, 2)]


def test_a_smoke_run_judges_nothing() -> None:
    for judged, verdicts in ((True, ["holds", "does not hold"]), (False, ["not judged"] * 2)):
        outcome = Outcome(judged=judged)
        outcome.claim("a", "1", "1", True)
        outcome.claim("b", "2", "3", False, "why")
        assert [claim.verdict for claim in outcome.claims] == verdicts
        assert outcome.claims[1].note == "why"


def test_tables_format_numbers_and_leave_texts_alone() -> None:
    outcome = Outcome()
    outcome.table(
        "t",
        {"": "", "share": ".1%", "n": ",", "loss": ".3g"},
        [("a", 0.1234, 5000, 0.00012345), ("b", "-", 1, "")],
    )
    assert outcome.tables[0].header == ("", "share", "n", "loss")
    assert outcome.tables[0].rows == (("a", "12.3 %", "5,000", "0.000123"), ("b", "-", "1", ""))
    with pytest.raises(ValueError, match="argument"):
        outcome.table("t", ("a", "b"), [("one",)])


def test_outcomes_do_not_share_their_lists() -> None:
    first, second = Outcome(), Outcome()
    first.claim("a", "b", "c", True)
    first.notes.append("n")
    assert second == Outcome()
