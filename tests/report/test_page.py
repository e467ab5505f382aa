"""Pages and pictures as text: whole, escaped, and without a network."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from tests.report.made import HANDFUL, Entrant, made
from thinwire.errors import ConfigError
from thinwire.predict import Overheads, Profile, profile
from thinwire.tools import report
from thinwire.tools.cli import app
from thinwire.tools.compare.records import Records, to_lines, write
from thinwire.tools.report import comparison, page
from thinwire.tools.report.figures import lines
from thinwire.tools.report.forecast import Forecast, Timed, forecast, link_of, operation_seconds, reason
from thinwire.tools.report.palette import styles
from thinwire.tools.report.picture import svg
from thinwire.tools.report.summary import Spread, summarise

EVIL = "</script><img src=x onerror=\"document.title='gone'\"> & 'x' %{y}"
BROKEN = Entrant("randomblock(ratio=0.1)", 0.1, 0.001, fails_at=37)


class Reader(HTMLParser):
    """Collects elements, and the text of scripts and everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def packed(text: str) -> dict[str, bytes]:
    """What is packed in a page, by the plot it is for or its id."""
    found = read(text)
    kinds = [attributes for tag, attributes in found.tags if tag == "script"]
    return {
        kind.get("data-for") or kind.get("id") or "records": gzip.decompress(base64.b64decode(script))
        for kind, script in zip(kinds, found.scripts, strict=True)
        if kind.get("type") == "application/gzip"
    }


def specs(text: str) -> list[dict]:
    """The plots of a page."""
    return [
        json.loads(content) for name, content in packed(text).items() if name not in ("records", "plotly")
    ]


@pytest.fixture(scope="module")
def text() -> str:
    return comparison.build(made((*HANDFUL, BROKEN), seeds=2), predict=False)


def test_the_page_asks_for_nothing_from_elsewhere(text: str) -> None:
    for tag, attributes in read(text).tags:
        assert tag not in ("link", "img", "iframe", "base", "object")
        assert not {"src", "href"} & attributes.keys()
    assert "default-src 'none'" in text
    assert "@import" not in text.partition("</style>")[0]


def test_plotly_is_there_once(text: str) -> None:
    assert text.count('id="plotly"') == 1
    assert b"* plotly.js v" in packed(text)["plotly"][:100]
    without = comparison.build(Records(made().setting), predict=False)
    assert "no runs in the records" in without
    assert 'id="plotly"' not in without


def test_the_page_is_small(text: str) -> None:
    assert len(text.encode()) < 2_300_000


def test_there_is_one_legend_with_every_method(text: str) -> None:
    names = [a["data-series"] for tag, a in read(text).tags if tag == "button" and "data-series" in a]
    assert names == [each.method for each in (*HANDFUL, BROKEN)]


def test_a_warning_stands_beside_the_speed_up() -> None:
    worse = Entrant("signsgd(scale='rms')", 0.001, 0.0, ceiling=0.8)
    found = comparison.build(made((*HANDFUL[:2], worse), target=None), predict=False)
    assert len(re.findall(r'<small class="bad">[0-9.]+ points worse than dense</small>', found)) == 1
    assert "by more than\n1 point on average" in found
    assert "points worse" not in comparison.build(made(HANDFUL[:2], target=None), predict=False)


def test_every_plot_is_one_that_plotly_accepts(text: str) -> None:
    from plotly.graph_objects import Figure

    found = specs(text)
    assert len(found) == 4
    for each in found:
        Figure(each["figure"])  # raises on any attribute or value that is not Plotly's
        assert each["figure"]["data"]


def test_all_views_of_the_curves_have_data(text: str) -> None:
    from plotly.graph_objects import Figure

    spec = specs(text)[0]
    views = spec["views"]
    assert [choice["key"] for choice in views["y"]] == ["accuracy", "test loss", "training loss"]
    assert [choice["key"] for choice in views["x"]] == ["seconds", "sent", "step"]
    for y in views["y"]:
        traces = views["columns"][y["key"]]
        assert len(traces) == len(spec["figure"]["data"])
        for x in views["x"]:
            Figure({"data": [], "layout": {**x["layout"], **y["layout"]}})
            assert all(len(trace[x["key"]]) == len(trace["y"]) for trace in traces)
            assert sum(len(trace[x["key"]]) for trace in traces) > 100


def test_failed_runs_are_shown_as_failed(text: str) -> None:
    found = read(text).text
    assert "Runs that failed" in found
    assert found.count("diverged: the loss is not a finite number at step 37") == 2
    assert "2 of 2 runs failed" in found


def test_text_of_records_is_escaped_everywhere() -> None:
    evil = Entrant(EVIL, 0.1, 0.001, fails_at=150)
    records = made(
        (HANDFUL[0], evil, Entrant(EVIL + "2", 0.1, 0.001)), model=EVIL, data=EVIL, command=EVIL, target=None
    )
    text = comparison.build(records, predict=False)
    assert "<img" not in text.replace("<\\u003c", "")
    assert read(text).text.count(EVIL) > 5
    picture = ElementTree.fromstring(svg(records))
    assert not [each for each in picture.iter() if each.tag.endswith("img")]
    for spec in specs(text):
        for trace in spec["figure"]["data"]:
            assert "<img" not in json.dumps({key: value for key, value in trace.items() if key != "meta"})


def test_the_records_are_inside(text: str) -> None:
    assert packed(text)["records"] == to_lines(made((*HANDFUL, BROKEN), seeds=2))


def test_not_a_number_does_not_break_the_page() -> None:
    assert json.loads(page.as_json({"a": [float("nan"), float("inf"), 1.0]})) == {"a": [None, None, 1.0]}


@pytest.mark.parametrize(
    "records",
    [
        made(HANDFUL[:1]),
        made((BROKEN,)),
        made(measure="perplexity", target=None),
        made(bandwidth=None, link="none", target=None),
        Records(made().setting),
        Records(made().setting, [], [], made().runs),
        made(interface=True),
        made(baseline=False),
        made(baseline=False, target=None),
    ],
    ids=[
        "one method",
        "all failed",
        "perplexity",
        "no link",
        "empty",
        "no curves",
        "interface",
        "no baseline",
        "no baseline, no target",
    ],
)
def test_reports_of_unusual_records(records: Records) -> None:
    text = comparison.build(records, predict=False)
    assert text.endswith("</html>\n")
    assert ("times as many bytes" in text) == any(run.interface_sent for run in records.runs)


def test_predictions_are_in_the_report() -> None:
    chosen = (HANDFUL[0], HANDFUL[1], Entrant("pytorch-powersgd", 0.02, 0.0))
    records = made(chosen, layers={"weight": (64, 64)})
    summaries = summarise(records)
    found = forecast(records, summaries)
    assert list(found.missing) == ["pytorch-powersgd"]
    dense, fp16 = found.predictions
    assert list(dense.by_bandwidth) == sorted(dense.by_bandwidth, reverse=True)
    assert fp16.by_bandwidth[0] < dense.by_bandwidth[0]
    assert dense.by_workers[-1] > dense.by_workers[0]
    text = comparison.render(records, summaries, found)
    assert "Not predicted: pytorch-powersgd" in read(text).text
    assert "faster than dense below" in read(text).text
    empty = comparison.render(records, summaries, Forecast((), {"dense": "because"}))
    assert "These methods cannot be predicted." in read(empty).text


def test_predictions_scale_with_the_recorded_work() -> None:
    one = made((Entrant("fp16", 0.03, 0.2),), layers={"weight": (64, 64)})
    other = made((Entrant("fp16", 0.03, 0.4),), layers={"weight": (64, 64)})
    fast, slow = (forecast(each, summarise(each)).predictions[0].by_bandwidth[-1] for each in (one, other))
    assert slow - fast == pytest.approx(0.2, rel=0.05)


def timed(step: float, sent: float = 3 * 64 * 64 / 2, wait: float = 0.001) -> Timed:
    """fp16 on a matrix of 64 x 64 with 4 workers; a step takes 10 ms of computing."""
    records = made((Entrant("fp16", 0.5, 0.0),), layers={"weight": (64, 64)})
    (one,) = summarise(records)
    same = {"step_seconds": step, "compute_seconds": 0.01, "wait_seconds": wait, "sent": 240 * sent}
    spreads = {name: Spread(value, value, value) for name, value in same.items()}
    runs = replace(one, **spreads, steps=Spread(240, 240, 240))
    return Timed(runs, {4: _halves()})


@functools.cache
def _halves() -> Profile:
    return profile("fp16", {"weight": (64, 64)}, 4, repeats=1)


def test_what_an_operation_costs_is_what_steps_take_longer() -> None:
    setting = made().setting
    free = timed(1.0).profiles[4].step_seconds(link_of(setting), 0.01)
    slow = [timed(free + extra) for extra in (0.002, 0.004, 0.3)]
    assert operation_seconds(slow, setting) == pytest.approx(0.004, rel=1e-6), "the median of the methods"
    assert operation_seconds([timed(free / 2)], setting) == 0.0


def test_a_prediction_far_from_its_measurement_says_why() -> None:
    setting, none = made().setting, Overheads()
    assert reason(timed(0.02), 0.02, 0.024, setting, none) is None
    sent = timed(0.05, sent=100_000.0)
    assert "depend on the data" in str(reason(sent, 0.02, 0.05, setting, none))
    own = timed(0.05, wait=0.03)
    real = own.profiles[4].sent_bytes
    waited = timed(0.05, sent=real, wait=0.03)
    assert "waited for each other or for a core" in str(reason(waited, 0.02, 0.05, setting, none))
    quick = timed(0.01, sent=real, wait=1e-6)
    assert "by the median of all methods" in str(reason(quick, 0.02, 0.01, setting, none))
    slow = timed(0.05, sent=real, wait=1e-6)
    assert "overlapped less than predicted" in str(reason(slow, 0.02, 0.05, setting, none))


def test_the_page_shows_why() -> None:
    records = made((HANDFUL[0],), layers={"weight": (64, 64)})
    summaries = summarise(records)
    found = forecast(records, summaries)
    told = Forecast(tuple(dataclasses.replace(one, why="of the weather") for one in found.predictions), {})
    text = read(comparison.render(records, summaries, told)).text
    assert "times the measured step, because of the weather" in " ".join(text.split())
    assert "because of" not in read(comparison.render(records, summaries, found)).text


def test_the_picture_names_every_method(tmp_path: Path) -> None:
    records = made((*HANDFUL, BROKEN))
    path = tmp_path / "deep" / "picture.svg"
    report.picture(records, path)
    root = ElementTree.parse(path).getroot()
    words = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert all(entrant.method in words for entrant in (*HANDFUL, BROKEN))
    assert {"failed", "not reached"} <= set(words)
    assert root.get("viewBox")
    with pytest.raises(ConfigError, match="nothing to draw"):
        report.picture(Records(records.setting, [], [], records.runs), path)


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path / "records.jsonl", made())
    out, picture = tmp_path / "a" / "page.html", tmp_path / "picture.svg"
    options = ["--out", str(out), "--picture", str(picture), "--no-predict"]
    result = CliRunner().invoke(app, ["report", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    assert "first to 97" in read(out.read_text()).text
    assert picture.read_text().startswith("<svg")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "records.jsonl"), "--no-predict", "--json"])
    assert [one["method"] for one in json.loads(result.output)] == [each.method for each in HANDFUL]
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "there is no file"),
        ("{}\n", "line 1: Object missing required field `kind`"),
        ("", "not the records of one comparison"),
    ],
)
def test_the_command_refuses_other_files(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "records.jsonl"
    if content is not None:
        path.write_text(content)
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 2
    assert expected in result.output
    assert not (tmp_path / "report.html").exists()


def test_reproductions_use_the_same_pages(tmp_path: Path) -> None:
    from reproductions.base import Claim, Outcome
    from reproductions.page import write_plots

    plot = lines({"line": ([0, 1], [1, 2])}, "x", "y")
    outcome = Outcome([Claim("it works", "yes", EVIL, True)], figures={"A <plot>": plot})
    outcome.table("T", ("a", "b"), [("1", "2")])
    outcome.notes.append("a note")
    path = tmp_path / "plots.html"
    write_plots(path, "Title", outcome.figures, outcome)
    found = read(path.read_text())
    assert all(each in found.text for each in ("A <plot>", EVIL, "a note", "T"))
    assert len(specs(path.read_text())) == 1


def test_plotly_is_imported_only_for_a_page() -> None:
    script = (
        "import sys, thinwire, thinwire.tools.report, thinwire.tools.cli; sys.exit('plotly' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_styles_follow_the_order_of_methods() -> None:
    records = made()
    assert list(styles(records.methods)) == records.methods
