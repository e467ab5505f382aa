"""Every reproduction runs as a smoke run, without any dataset, and finds what even a short run must find.

A second run reads the parts of the first and says the same.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reproductions import NAMES, asylpg, find, sparse
from reproductions.cli import app
from reproductions.pqasgd import SPEED_UP
from tests.report.test_page import packed

Rows = list[dict[str, str]]


class Smoke:
    """An outcome whose tables have rows by column."""

    def __init__(self, outcome: dict[str, Any]) -> None:
        self.claims = outcome["claims"]
        self.tables: list[Rows] = [
            [dict(zip(table["header"], row, strict=True)) for row in table["rows"]]
            for table in outcome["tables"]
        ]


def number(text: str) -> float:
    return float(text.removesuffix(" %").replace(",", ""))


def column(rows: Rows, name: str, key: str) -> dict[str, float]:
    return {row[key]: number(row[name]) for row in rows}


def pqasgd(smoke: Smoke) -> None:
    assert len(smoke.claims) == 7
    norms, methods, _, optimizers = smoke.tables
    assert [len(table) for table in smoke.tables] == [3 * len(SPEED_UP), 3, 10, 3 * 5 + 2]
    names = [row["optimizer"] for row in optimizers if row["method"] == "a worker alone"]
    assert names == ["SGD", "momentum 0.9", "AdamW"]
    of_dense = column(methods, "of dense", "method")
    assert of_dense["dense"] == 100
    assert 4 < of_dense["pqasgd(every=8, bits=8)"] < of_dense["pqasgd(every=5, bits=8)"] < 8
    one_worker = [row for row in norms if row["M"] == "1"]
    # Alone, a worker averages nothing: the same run, whatever the schedule.
    assert one_worker[0]["K = 16"] == one_worker[1]["K = 16"]


def gaussiank(smoke: Smoke) -> None:
    shapes, fits, losses, counts, times, accuracies = smoke.tables
    models = {"logistic regression", "MLP", "CNN", "ResNet-20", "LSTM", "transformer"}
    for table in (shapes, fits, losses, counts):
        assert {row["model"] for row in table} == models
    assert all(0 < number(row["Gaussian"]) < 1 for row in fits)
    assert all(0 < number(row["lost"]) <= number(row["(1 - k/d)^2"]) for row in losses)
    assert all(0.66 <= number(row["thinwire"]) <= 1.34 for row in counts)
    assert all(number(row["d = 100,000"]) > 0 for row in times)
    assert len(times) == 6
    assert [row["method"] for row in accuracies] == ["dense", "a lone worker", "topk", "gaussiank"]


def a2sgd(smoke: Smoke) -> None:
    rows, steps = smoke.tables
    left, sent, spread = (column(rows, name, "method") for name in ("left", "sent", "spread"))
    two_means = "a2sgd(average_every=None, allow_drift=True)"
    assert left["dense"] == spread["dense"] == 0
    assert left["no communication"] == 100 > left[two_means] > 90
    assert sent["no communication"] == 0 < sent[two_means] < 100 < sent["a2sgd(average_every=32)"]
    sent = column(steps, "sent", "method")
    assert sent["dense"] > 5 * sent["qsgd(bits=4, reduce='gather')"] > sent[two_means]
    assert len({row["compute"] for row in steps}) == 1
    assert all(number(row["step"]) > number(row["exchange"]) >= number(row["network"]) for row in steps)


def constant_in_workers(rows: Rows) -> None:
    ours, local = ({name: number(row[name]) for name in ("4", "16")} for row in rows)
    assert ours["16"] / ours["4"] < 1.5
    assert local["16"] / local["4"] == 5


def sketched(smoke: Smoke) -> None:
    rows, sizes, wire, *models = smoke.tables
    assert len(rows) == 6
    for table in models:
        # Sketches are linear: how many workers share the rows makes no difference but in rounding.
        assert [row[""] for row in table] == ["dense", "a worker alone", "2 workers", "4 workers"]
        assert table[2]["last loss"] == table[3]["last loss"]
    assert len(models) == 3
    saved = [float(row["of dense"].removeprefix("1 / ")) for row in wire]
    assert saved[0] == 1
    assert 20 < saved[1] < 21
    assert saved[2] == saved[3] > 40
    found = [number(row["found"]) for row in rows if row["found"]]
    assert found == sorted(found, reverse=True)
    assert len(found) == 4
    constant_in_workers(sizes)


def scalecom(smoke: Smoke) -> None:
    alike, sizes, accuracies, *others = smoke.tables
    payload = column(accuracies, "payload per step", "")
    assert payload["dense"] > payload["70x"] > payload["100x"] > payload["150x"]
    for row in alike:
        memories, gradients = (number(row[name].split(" / ")[1]) for name in ("memories", "gradients"))
        assert memories < gradients / 2
    constant_in_workers(sizes)
    assert len(others) == 3 + 3
    for table in others[-3:]:
        assert [row[""] for row in table[2:]] == ["beta=1", "beta=0.1"]


def asylpg_(smoke: Smoke) -> None:
    assert len(smoke.claims) >= 3 + 2 * len(asylpg.PUBLISHED)
    gaps = column(smoke.tables[0], "last gap", "algorithm")
    assert list(gaps) == list(asylpg.SMOKE)
    assert max(gaps.values()) < 1e-3
    # Not at 1e-02, which the noise of the first epoch reaches by chance.
    cells = {row["algorithm"]: row["1e-03"] for row in smoke.tables[0]}
    saved = {name: float(cell.partition("(")[2].removesuffix("x)")) for name, cell in cells.items()}
    # The workers are asynchronous: what one side alone saves in so short a run may be nothing.
    assert saved["AsyLPG"] > max(1, saved["gradients only"], saved["model only"])
    widths = {row["algorithm"]: row["1"] for row in smoke.tables[1]}
    assert widths["full precision"] == "32.1 + 32.1"
    assert widths["gradients only"] == "32.1 + 4.6"
    assert widths["model only"].endswith(" + 32.1")
    assert list(widths) == [row["algorithm"] for row in smoke.tables[2]]


def distributions(smoke: Smoke) -> None:
    assert len(smoke.claims) == 8
    _, errors, powers, _, _, many, raw, structured, monotone, formulas = smoke.tables
    ratios = [number(value) for row in formulas for name, value in row.items() if name != "protocol"]
    assert len(ratios) == 5 * 13
    assert 0.5 < min(ratios) < max(ratios) < 2
    assert all(number(row["factor"]) > number(row["promised"]) > 1 for row in structured)
    l2 = column(errors, "squared l2", "protocol")
    assert l2["raw"] < l2["grouping, 4 bit"] < l2["grouping, 2 bit"] < l2["grouping, 1 bit"]
    for row in powers:
        assert number(row["n"]) == pytest.approx(-1.0 if row["norm"] == "l2" else -0.5, abs=0.15)
        assert number(row["k"]) == pytest.approx(1.0, abs=0.15)
    assert all(number(row["l2 factor"]) > 8 for row in many)
    assert all(0.5 < number(row["constant"]) < 0.8 for row in raw)
    assert number(monotone[0]["l1"]) > number(monotone[2]["l1"])


def lag(smoke: Smoke) -> None:
    uploads = column(smoke.tables[0], "uploads", "algorithm")
    assert uploads["lag-wk"] < uploads["lag-ps"] < uploads["gd"] / 3
    assert len(smoke.tables[0]) == 8
    assert uploads["lag-ps"] < min(uploads["iag-cyclic"], uploads["iag-random"])


def laq(smoke: Smoke) -> None:
    # Runs with full gradients are short: they are judged in a smoke run, too. The authors' settings are not.
    assert [claim["holds"] for claim in smoke.claims[-2:]] == [None, None]
    assert all(claim["holds"] for claim in smoke.claims[:-2])
    linear, authors, network = smoke.tables
    bits = column(linear, "bits", "algorithm")
    assert bits["laq"] < bits["lag-wk"] < bits["qgd"] < bits["gd"]
    shares = column(authors, "of all", "method")
    assert shares["slaq(bits=3)"] < shares["slaq(bits=3, allowance=0.2)"] < shares["qsgd(bits=4)"] == 100
    uploads = column(network, "uploads", "method")
    assert uploads["lasg"] < uploads["slaq(bits=4, allowance=0)"] <= uploads["dense"]


def gspar(smoke: Smoke) -> None:
    for row in smoke.tables[0]:
        assert number(row["E||Q||^2 / ||g||^2"]) == pytest.approx(1 + number(row["budget"]))
        assert number(row["drawn"]) == pytest.approx(1 + number(row["budget"]), rel=0.05)
        assert number(row["entropy"]) < number(row["encoded bits"]) < 1.03 * number(row["entropy"]) + 128
        assert number(row["encoded bits"]) < number(row["paper's count"]) < number(row["bound on bits"])
    for name in ("SGD", "SVRG"):
        gaps = column([row for row in smoke.tables[1] if row[""] == name], "step 1", "gradient")
        assert gaps["dense"] < gaps["GSpar 10 %"] < gaps["uniform 10 %"]
    runs = {(row["model"], row["gradient"], row["threads"]): row for row in smoke.tables[2]}
    assert len(runs) == 2 * 3 * 2
    for model in ("SVM", "logistic"):
        for threads in ("1", "2"):
            sparse, dense = (runs[model, gradient, threads] for gradient in ("GSpar 10 %", "dense"))
            assert number(sparse["writes"]) < number(dense["writes"]) / 5


def sparse_(smoke: Smoke) -> None:
    rows, effects = smoke.tables
    assert len(rows) == 2 + len(sparse.cells(scaled=True))
    assert rows[1]["rule"] == "a worker alone"
    corners = {(row["rule"], row["indices"]) for row in rows if row["payload per step"] == "-"}
    assert corners == {("top-k", "shared"), ("random block", "own")}
    (feedback,) = (row for row in effects if row["change"] == "error feedback on")
    assert feedback["top-k"].endswith(" of 4")


CHECKS: dict[str, Callable[[Smoke], None]] = {
    "pqasgd": pqasgd,
    "gaussiank": gaussiank,
    "a2sgd": a2sgd,
    "sketched": sketched,
    "scalecom": scalecom,
    "asylpg": asylpg_,
    "distributions": distributions,
    "lag": lag,
    "laq": laq,
    "gspar": gspar,
    "sparse": sparse_,
}

# The title of a figure, and the name of a curve in the first one.
PLOTTED = {
    "pqasgd": ("Loss against the step K", "two local steps"),
    "gaussiank": ("residual + gradient of CNN, standardised", "normal"),
    "a2sgd": ("averaged against steps", "no communication"),
    "sketched": ("bytes received against workers", "sketched"),
    "scalecom": ("Hamming distance of a worker", "step size 0.01, beta=1"),
    "asylpg": ("Gap over bits, digits", "accelerated AsyLPG"),
    "distributions": ("l1 error against total bits, domain 256", "minimax rate, 1 bit"),
    "lag": ("gap against uploads", "lag-wk"),
    "laq": ("training loss against bits", "lag-wk"),
    "gspar": ("gap against bits", "SVRG, GSpar 10 %"),
    "sparse": ("Accuracy against compression time, digits", "random block"),
}


LONG = {"asylpg", "pqasgd", "sparse"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in NAMES]
)
def test_smoke(name: str, tmp_path: Path) -> None:
    arguments = [name, "--quick", "--out", str(tmp_path), "--json"]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    outcome = json.loads(first.stdout)[name]
    folder = tmp_path / f"{name}-quick"
    assert json.loads((folder / "outcome.json").read_text()) == outcome
    assert all(claim["what"] and claim["paper"] and claim["ours"] for claim in outcome["claims"])
    assert name == "laq" or {claim["holds"] for claim in outcome["claims"]} <= {None}
    assert find(name).rules
    html = (folder / "plots.html").read_text()
    plots = b"".join(packed(html).values()).decode()
    assert all(words in html or words in plots for words in PLOTTED[name])
    assert PLOTTED[name][1] in (folder / "picture.svg").read_text()
    CHECKS[name](Smoke(outcome))
    parts = {path: path.stat().st_mtime_ns for path in (folder / "parts").iterdir()}
    assert parts
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in (folder / "parts").iterdir()} == parts
    assert again.stdout == first.stdout
