"""The option `--device`: where models and kernels run."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import typer

from thinwire.errors import ConfigError

Name = Literal["cpu", "cuda"]
DeviceOption = Annotated[Name, typer.Option("--device", help="Where to run: cpu, or cuda with a GPU.")]


def checked(name: Name) -> Name:
    """This device, if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} finds no GPU here (torch.cuda.is_available() is "
            "False). Install a build of torch for the driver of this machine, or use --device cpu"
        )
    return name


def of_rank(name: Name, rank: int = 0) -> torch.device:
    """The device of a worker: the GPUs of this machine in turn."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if name == "cuda" else torch.device("cpu")


def finish(device: torch.device) -> None:
    """Wait until the device has done all its work: only then may a clock be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
