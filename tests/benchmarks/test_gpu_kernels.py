"""The tables of the GPU kernels: one program, really compiled, and one case that was recorded elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import gpu_kernels
from benchmarks.cli import bench

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
    monkeypatch.setattr(gpu_kernels, "interpreted", lambda: [case])
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
