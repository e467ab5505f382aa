"""`--device cuda` on a machine without a GPU: an error that says what to do."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli import bench
from thinwire.errors import ConfigError
from thinwire.tools import devices
from thinwire.tools.cli import app

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_gpu
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (bench, ["kernels", "--device", "cuda", "--size", "1000"]),
        (bench, ["overhead", "--device", "cuda", "--steps", "1"]),
        (app, ["compare", "--device", "cuda"]),
    ],
)
def test_without_a_gpu_it_is_a_usage_error(command, arguments: list[str]) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert "finds no GPU here" in result.output
    assert "--device cpu" in result.output


@without_gpu
def test_the_device_of_a_rank() -> None:
    assert devices.checked("cpu") == "cpu"
    assert devices.of_rank("cpu", 3) == torch.device("cpu")
    devices.finish(torch.device("cpu"))
    with pytest.raises(ConfigError, match="is_available"):
        devices.checked("cuda")
