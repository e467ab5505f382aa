"""Every command of `python -m benchmarks`, with tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import checksums, digits, hsdp, kernels, methods, overhead, peers, pieces, run
from benchmarks.cli import bench

ROOT = Path(__file__).parents[2]


def call(*arguments: str):
    return CliRunner().invoke(bench, list(arguments))


def test_it_starts_from_the_root_of_the_repository() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for command in (
        "overhead",
        "kernels",
        "gpu-kernels",
        "methods",
        "checksums",
        "peers",
        "hsdp",
        "scale",
        "digits",
        "predict",
        "all",
    ):
        assert command in result.stdout


def test_digits_trains_and_compares(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    file = tmp_path / "digits.json"
    arguments = ("--workers", "2", "--steps", "80", "-m", "topk", "--json", str(file))
    result = call("digits", *arguments)
    assert result.exit_code == 0, result.output
    dense, topk = json.loads(file.read_text())["results"]
    assert (dense["method"], topk["method"]) == ("dense", "topk(ratio=0.01)")
    assert dense["ratio"] == 1.0
    assert topk["ratio"] < 0.1
    assert dense["accuracy"] > 0.5
    assert topk["accuracy"] > 0.5
    assert "topk(ratio=0.01)" in result.output


def test_digits_takes_methods_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(digits, "run", lambda strings, *_: asked.extend(strings) or [])
    assert call("digits", "-m", "topk(ratio=0.1, scope='model'),qsgd", "-m", "fp16").exit_code == 0
    assert asked == ["dense", "topk(ratio=0.1, scope='model')", "qsgd(bits=4)", "fp16"]


def test_methods_counts_copies(tmp_path: Path) -> None:
    file = tmp_path / "methods.json"
    arguments = ("--size", "10000", "-m", "dense", "-m", "topk", "--json", str(file))
    result = call("methods", *arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert [row["method"] for row in rows] == ["dense", "topk(ratio=0.01)"]
    assert all(row["copies"] > 0 and row["copies_in_place"] > 0 for row in rows)


def test_checksums_are_a_share_of_a_step(tmp_path: Path) -> None:
    file = tmp_path / "checksums.json"
    arguments = ("--size", "10000", "--steps", "2", "-m", "dense", "-m", "topk", "--json", str(file))
    result = call("checksums", *arguments)
    assert result.exit_code == 0, result.output
    assert "bar: 2 %" in result.output
    rows = json.loads(file.read_text())
    methods = ["dense", "topk(ratio=0.01)"]
    assert [(row["step"], row["method"]) for row in rows] == [
        (step, method) for step in (checksums.ALONE, checksums.DDP) for method in methods
    ]
    for dense, topk in (rows[:2], rows[2:]):
        assert dense["blocks"] == dense["percent"] == 0, "a mean has no frame"
        assert topk["blocks"] >= 1
        assert 0 < topk["percent"] < 100


def test_run_measures_both_models(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    result = call("run", "--steps", "2", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert [row["method"] for row in rows] == list(run.METHODS)
    assert all(row["ratio"] > 0 for row in rows)


def test_overhead_measures_one_and_twenty_buckets(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    result = call("overhead", "--steps", "2", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert [row["buckets"] for row in rows] == [1, 20]
    assert all(row["parameters"] == 2_599_200 and len(row["milliseconds"]) == 3 for row in rows)


def test_scale_of_few_simulated_workers(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    arguments = ("--workers", "2,8", "--size", "5000", "-m", "randomblock", "-m", "topk(reduce='gather')")
    assert call("scale", *arguments, "--json", str(file)).exit_code == 0
    rows = {
        (row["method"].split("(")[0], row["workers"]): row["sent_bytes"]
        for row in json.loads(file.read_text())
    }
    assert rows["randomblock", 8] < 2 * rows["randomblock", 2]
    assert rows["topk", 8] == 7 * rows["topk", 2]
    assert "numbers with commas" in call("scale", "--workers", "two").output


def test_kernels_of_one_name(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    result = call("kernels", "--size", "5000", "--only", "sign pack", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert [row["name"] for row in rows] == ["sign pack", "sign pack + mean |x|"]
    assert "1 copy = the time to copy the same tensor in memory" in " ".join(result.output.split())


@pytest.mark.slow
def test_peers_are_timed_and_their_bytes_counted(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    result = call("peers", "--steps", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = {row["variant"]: row for row in json.loads(file.read_text())}
    assert list(rows) == list(peers.VARIANTS)
    assert all(row["milliseconds"] > 0 for row in rows.values())
    if peers.COUNTER.exists():
        assert rows["thinwire topk(ratio=0.01)"]["bytes_per_step"] < 1e6 < rows[peers.PLAIN]["bytes_per_step"]


@pytest.mark.slow
def test_sharded_replicas_are_timed_beside_native_ones(tmp_path: Path) -> None:
    file = tmp_path / "hsdp.json"
    result = call("hsdp", "--link", "none", "--steps", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert [row["variant"] for row in rows] == list(hsdp.VARIANTS)
    assert rows[0]["ratio"] == 1.0
    assert all(row["milliseconds"] > 0 for row in rows)


def test_predictions_are_for_links_of_the_lab() -> None:
    result = call("predict", "--link", "100mbit")
    assert result.exit_code == 2
    assert "lab:100mbit, not 100mbit" in result.output


def test_what_a_laptop_cannot_simulate_is_extrapolated(tmp_path: Path) -> None:
    """A gather sends a worker's own code to all others, and receives theirs."""
    file = tmp_path / "scale.json"
    method = "qsgd(reduce='gather')"
    result = call("scale", "--workers", "8,200000", "--size", "5000", "-m", method, "--json", str(file))
    assert result.exit_code == 0, result.output
    few, many = json.loads(file.read_text())
    assert many["sent_bytes"] / few["sent_bytes"] == pytest.approx(199_999 / 7, rel=0.05)
    assert many["received_bytes"] / few["received_bytes"] == pytest.approx(199_999 / 7, rel=0.05)


def test_all_is_one_record_of_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "all.json"
    monkeypatch.setattr(overhead, "report", lambda steps: [f"{steps} steps"])
    for module in (kernels, methods):
        monkeypatch.setattr(module, "report", lambda size, threads: [f"{size} entries, {threads} threads"])
    result = call("all", "--size", "7", "--threads", "2", "--steps", "3", "--json", str(file))
    assert result.exit_code == 0, result.output
    measured = ["7 entries, 2 threads"]
    assert json.loads(file.read_text()) == {"overhead": ["3 steps"], "kernels": measured, "methods": measured}


def test_pieces_are_timed_beside_one_operation() -> None:
    rows = pieces.run(["100mbit"], 2, 100_000)
    assert [row.operation for row in rows] == ["gather", "all-to-all"]
    assert all(min(row.whole, row.pieces, row.bytes_alone) > 0 for row in rows)
    result = call("pieces", "--link", "100mbit")
    assert result.exit_code == 2
    assert "only the lab's links" in result.output
