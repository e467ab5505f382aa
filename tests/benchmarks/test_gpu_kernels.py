"""The tables of the GPU kernels: one program, really compiled, and one case that was recorded elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import gpu_kernels
from benchmarks.cli import bench
from benchmarks.gpu_cases import CASES, Case

LAUNCH = {
    "module": "thinwire.kernels.triton.programs.feedback",
    "name": "zero_at",
    "types": {"x": "*fp32", "indices": "*i32", "k": "i32", "BLOCK": "constexpr"},
    "constants": {"BLOCK": 512},
    "settings": {"enable_fp_fusion": False},
}


def test_it_shows_passes_and_registers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    case = {"name": "zeroing", "passes": 1.25, "lists": 0.5, "cpu": 1.0, "launches": [LAUNCH]}
    monkeypatch.setattr(gpu_kernels, "interpreted", lambda only: [case])
    file = tmp_path / "gpu.json"
    result = CliRunner().invoke(bench, ["gpu-kernels", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "1.25" in result.output
    record = json.loads(file.read_text())
    assert record["passes"] == [{"name": "zeroing", "passes": 1.25, "lists": 0.5, "cpu": 1.0}]
    (row,) = record["programs"]
    assert row["program"] == "feedback.zero_at"
    for target in ("sm_80", "sm_90", "gfx942"):
        registers, shared, spilled = row[target]
        assert 4 <= registers <= 255
        assert (shared, spilled) == (0, 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_call_that_works(case: Case) -> None:
    """On the CPU, where it takes no time; the interpreter runs them in `make test-slow`."""
    case.make(131072)()


@pytest.mark.slow
def test_every_case_is_interpreted() -> None:
    pytest.importorskip("triton")
    assert [case["name"] for case in gpu_kernels.interpreted("")] == [case.name for case in CASES]
