"""Parts are computed once, whatever happens in between; claims and tables are what they were told."""

import multiprocessing
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from reproductions import Context, Outcome
from reproductions.base import Reproduction, Section
from reproductions.cohort import Recipe
from reproductions.parts import NotRunError, described
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


def parts_of(run: Context) -> list[Path]:
    return sorted((run.folder / "parts").glob("*.json"))


def test_a_stopped_run_continues(tmp_path: Path) -> None:
    first = context(tmp_path)
    made = first.once(work, "a", factor=2.0)
    assert made == work("a", 2.0)
    (path,) = parts_of(first)
    path.with_suffix(".partial").write_bytes(b"killed while it wro")
    found = context(tmp_path).each({"one": partial(work, "a", factor=2.0), "two": partial(work, "b")})
    assert found == {"one": made, "two": work("b")}
    assert CALLS == ["a", "a", "b", "b"]
    assert context(tmp_path).once(work, "b") == found["two"]
    assert CALLS == ["a", "a", "b", "b"]


def slowly(path: str, name: str) -> int:
    """Notes who computes it, and takes its time."""
    with Path(path).open("a") as file:
        file.write(f"{name}\n")
    time.sleep(0.3)
    return len(name)


def share_work(folder: Path, names: tuple[str, ...]) -> dict[str, int]:
    return context(folder).each({name: partial(slowly, str(folder / "log"), name) for name in names})


def test_processes_share_the_work(tmp_path: Path) -> None:
    """Every part is computed once, in whatever order; both see all of them."""
    names = ("one", "two", "three", "four")
    other = multiprocessing.get_context("fork").Process(target=share_work, args=(tmp_path, names[::-1]))
    other.start()
    assert share_work(tmp_path, names) == {name: len(name) for name in names}
    other.join(200)
    assert other.exitcode == 0
    assert sorted((tmp_path / "log").read_text().split()) == sorted(names)


def test_records_are_read_and_continued(tmp_path: Path) -> None:
    records = tmp_path / "records"
    for out in ("first", "second"):
        run = Context("x", data=None, quick=False, out=tmp_path / out, records=records)
        assert run.once(other, "abc") == 3
        assert [path.parent.name for path in records.rglob("*.json")] == ["x"]
    assert not list((tmp_path / "second").rglob("*.json"))


def test_what_is_not_finished_is_said_and_not_judged(tmp_path: Path) -> None:
    def done(run: Context, outcome: Outcome) -> None:
        outcome.claim("done", "1", str(run.once(other, "a")), True)

    def open_(run: Context, outcome: Outcome) -> None:
        outcome.claim("half", "1", "1", True)
        found = run.each({name: partial(other, name) for name in ("a", "bb", "ccc")})
        outcome.claim("open", "6", str(sum(found.values())), True)

    doc = "What.\n\nVerdicts:\n- One: fails\n  if so.\n- Two: never.\n"
    sections = (Section("first", done), Section("second", open_))
    whole = Reproduction("t", "p", sections, doc, "take")
    assert whole.rules == ["One: fails if so.", "Two: never."]
    finished = Context("x", data=None, quick=False, out=tmp_path, finished=True)
    with pytest.raises(NotRunError):
        finished.once(other, "a")
    Context("x", data=None, quick=False, out=tmp_path).once(other, "a")
    outcome, left = whole.run(finished)
    assert [claim.what for claim in outcome.claims] == ["done", "second"]
    assert [claim.verdict for claim in outcome.claims] == ["holds", "not judged"]
    assert "python -m reproductions x --data DATA" in outcome.claims[1].note
    assert [(one.what, one.done, one.total) for one in left] == [("second", 1, 3)]
    outcome, left = whole.run(Context("x", data=None, quick=False, out=tmp_path), only="first")
    assert [one.what for one in left] == ["second"]
    outcome, left = whole.run(Context("x", data=None, quick=False, out=tmp_path))
    assert [claim.what for claim in outcome.claims] == ["done", "half", "open"]
    assert left == []


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
    (path,) = parts_of(run)
    good = path.read_bytes()
    for bad in (good[:-3], b"", b'{"call": "f", "value": 3}'):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match="remove it to compute it again"):
            run.once(work, "a")
    run.once(other, "abc")
    (mine,) = (each for each in parts_of(run) if each != path)
    mine.write_text('{"call": "another()", "seconds": 1.5, "value": 3}')
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
    assert described(Recipe("mlp", steps=7)) == "Recipe(model='mlp', steps=7)"
    for bad in (torch.ones(3), tmp_path, lambda: 3, (1, tmp_path)):
        with pytest.raises(TypeError, match="does not describe itself"):
            described(bad)


def test_progress_names_what_was_computed(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    run = Context("x", data=None, quick=True, out=tmp_path, progress=lambda *what: told.append(what[:3]))
    parts = {(4, "workers"): partial(other, "a"), "b": partial(other, "b")}
    for _ in range(2):
        run.each(parts, "bytes:")
    assert told == [("bytes: 4 workers", 1, 2), ("bytes: b", 2, 2)]


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
