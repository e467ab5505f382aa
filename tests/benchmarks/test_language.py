"""The language-model study: its summary, its predicted times, and what it writes for others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from benchmarks import language_page as pages
from benchmarks.cli import bench
from benchmarks.language import SIZES, Study, summary
from benchmarks.language_runs import ALONE, PYTORCH, Run, Setting
from benchmarks.language_times import LINKS, STAND_IN, by_link, step_seconds
from thinwire import parse, predict

SHAPES = {"wide": (300, 200), "bias": (300,)}
ADAM = "adam(exchange=efsign(bucket=4096))"
# Loss and bytes per step; all of it is made up.
MADE = {
    "dense": (2.0, 1000.0),
    ALONE: (2.2, 0.0),
    ADAM: (1.99, 31.0),
    "qsgd(bits=4)": (2.01, 130.0),
    "sparseloco(every=5, ratio=0.05)": (2.06, 5.0),
    PYTORCH: (2.3, 40.0),
}


def runs() -> dict[str, list[Run]]:
    return {
        name: [Run(name, 0.002, seed, [(10, 3.0), (20, loss + 0.01 * (seed - 1))], sent) for seed in range(3)]
        for name, (loss, sent) in MADE.items()
    }


def written(tmp_path: Path, found: dict[str, list[Run]] | None = None, name: str = "records.json") -> Path:
    """A file of the study, and a page to fill."""
    setting = Setting("text:/somewhere/deep/shakespeare/input.txt.xz", SIZES["2m"], 4, 1000, 4).public()
    study = Study(
        setting=setting, rates=[0.001, 0.002], seeds=3, runs=found or runs(), compute=0.1, shapes=SHAPES
    )
    file = tmp_path / name
    file.write_bytes(msgspec.json.encode(study))
    (tmp_path / "docs").mkdir(exist_ok=True)
    (tmp_path / pages.PAGE).write_text(f"# Before\n\n{pages.BEGIN}\n{pages.END}\n\nAfter\n")
    return file


def call(*arguments: str):
    return CliRunner().invoke(bench, ["language-page", *arguments])


def test_a_method_recovers_a_part_of_the_gap() -> None:
    rows = {row.method: row for row in summary(runs())}
    assert list(rows)[:2] == [ADAM, "dense"]
    assert rows["qsgd(bits=4)"].recovered == pytest.approx(0.95)
    assert rows[PYTORCH].recovered == pytest.approx(-0.5)
    assert rows[ADAM].sent == pytest.approx(0.031)
    assert rows[ADAM].spread == pytest.approx(0.02)


@pytest.mark.usefixtures("counted_time")
def test_predicted_times_of_every_kind_of_method() -> None:
    found = by_link(MADE, SHAPES, 4, 0.01)
    assert set(found[ALONE].values()) == {0.01}
    for own in found.values():
        assert list(own) == list(LINKS)
        assert list(own.values()) == sorted(own.values(), reverse=True)
    slow = LINKS["10 Mbit/s"]
    assert found["dense"]["10 Mbit/s"] > 5 * found[ADAM]["10 Mbit/s"]
    stand_in = predict.step_seconds(STAND_IN, SHAPES, 4, slow, 0.01)
    assert found[PYTORCH]["10 Mbit/s"] == pytest.approx(stand_in)


@pytest.mark.usefixtures("counted_time")
def test_a_schedule_shares_out_its_sync_round_and_overlap_hides_it() -> None:
    slow = LINKS["10 Mbit/s"]
    whole = predict.step_seconds("qsgd(bits=4)", SHAPES, 4, slow, 0.0, host="average")
    plain = step_seconds("pqasgd(every=8, bits=4)", SHAPES, 4, slow, 0.01)
    assert plain == pytest.approx(0.01 + whole / 8, rel=0.2)
    hidden = step_seconds("pqasgd(every=8, bits=4, overlap=6)", SHAPES, 4, slow, whole / 4)
    assert hidden == pytest.approx(whole / 4)


def test_the_page_the_picture_and_the_table_come_from_the_records(tmp_path: Path) -> None:
    file = written(tmp_path)
    for _ in range(2):  # again: it replaces what it has written
        result = call(str(file), "--root", str(tmp_path))
        assert result.exit_code == 0, result.output
    page = (tmp_path / pages.PAGE).read_text()
    assert page.startswith("# Before\n")
    assert page.endswith("\nAfter\n")
    assert page.count("| `dense` | 0.002 | 3 | 2.000 | +0.000 | 100 % | 100 % |") == 1
    assert f"no worse than `dense`: `{ADAM}`, 3.1 % of the bytes" in page
    assert "at most 0.08 nats behind `dense`: `sparseloco(every=5, ratio=0.05)`, 0.5 %" in page
    assert "--data text:DATA/shakespeare/input.txt.xz" in page
    picture = (tmp_path / pages.PICTURE).read_text()
    assert all(name in picture for name in MADE)
    table = json.loads((tmp_path / pages.TABLE).read_text())
    assert {row["method"]: row["behind"] for row in table["rows"]}["qsgd(bits=4)"] == pytest.approx(0.01)
    for text in (page, picture, json.dumps(table)):
        assert "somewhere" not in text, "no folder of this machine"


def test_the_package_reads_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.predict import language

    assert call(str(written(tmp_path)), "--root", str(tmp_path)).exit_code == 0
    monkeypatch.setattr(language, "files", lambda _: tmp_path / "src/thinwire/predict")
    language.behind.cache_clear()
    try:
        assert language.behind()[str(parse(ADAM))] == pytest.approx(-0.01)
        assert PYTORCH not in language.behind()
        assert "sparseloco(every=5, ratio=0.05)" not in language.close()
    finally:
        language.behind.cache_clear()


def test_studies_of_one_setting_make_one_table_and_compare_with_the_same_seeds(tmp_path: Path) -> None:
    few = {name: own for name, own in runs().items() if name != "qsgd(bits=4)"}
    one = {name: own[2:] for name, own in runs().items()}  # only the last seed, with all losses 0.01 higher
    files = [str(written(tmp_path, few)), str(written(tmp_path, one, "one.json"))]
    result = call(*files, "--root", str(tmp_path))
    assert result.exit_code == 0, result.output
    rows = {row["method"]: row for row in json.loads((tmp_path / pages.TABLE).read_text())["rows"]}
    assert {name: row["seeds"] for name, row in rows.items()} == dict.fromkeys(few, 3) | {"qsgd(bits=4)": 1}
    assert rows["qsgd(bits=4)"]["loss"] == pytest.approx(2.02)
    assert rows["qsgd(bits=4)"]["behind"] == pytest.approx(0.01)
    assert (tmp_path / pages.PAGE).read_text().count("    python -m benchmarks language") == 2


def test_longer_runs_of_the_same_model_come_first_in_the_table_of_the_package(tmp_path: Path) -> None:
    few = {name: own for name, own in runs().items() if name != "qsgd(bits=4)"}
    longer, shorter = written(tmp_path, few), written(tmp_path, name="shorter.json")
    study = msgspec.json.decode(longer.read_bytes(), type=Study)
    study.setting = replace(study.setting, steps=2000)
    longer.write_bytes(msgspec.json.encode(study))
    assert call(str(longer), str(shorter), "--root", str(tmp_path)).exit_code == 0
    rows = {row["method"]: row for row in json.loads((tmp_path / pages.TABLE).read_text())["rows"]}
    assert {name: row["steps"] for name, row in rows.items()} == dict.fromkeys(few, 2000) | {
        "qsgd(bits=4)": 1000
    }
    page = (tmp_path / pages.PAGE).read_text()
    assert page.count("language.svg") == 1
    assert page.index("1,000 steps") < page.index("language.svg"), "that of all methods"


def test_what_is_no_study_or_has_no_place_is_one_line(tmp_path: Path) -> None:
    file = written(tmp_path)
    (tmp_path / pages.PAGE).write_text("nothing to fill")
    assert "must have the lines" in call(str(file), "--root", str(tmp_path)).output
    file.write_text("{}")
    result = call(str(file), "--root", str(tmp_path))
    assert result.exit_code == 2
    assert "is not a file of" in result.output
