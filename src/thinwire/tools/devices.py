"""The option `--device`: where models and kernels run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from thinwire.errors import ConfigError

if TYPE_CHECKING:  # the command line imports this before it knows whether it needs torch
    import torch

Name = Literal["cpu", "cuda"]
DeviceOption = Annotated[Name, typer.Option("--device", help="Where to run: cpu, or cuda with a GPU.")]


def checked(name: Name) -> Name:
    """This device, if there is one."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} finds no GPU here (torch.cuda.is_available() is "
            "False). Install a build of torch for the driver of this machine, or use --device cpu"
        )
    return name


def of_rank(name: Name, rank: int = 0) -> torch.device:
    """The device of a worker: the GPUs of this machine in turn."""
    import torch

    return torch.device("cuda", rank % torch.cuda.device_count()) if name == "cuda" else torch.device("cpu")


def finish(device: torch.device) -> None:
    """Wait until the device has done all its work: only then may a clock be read."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
