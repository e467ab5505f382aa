"""`thinwire run`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.errors import ConfigError
from thinwire.tools.cli.show import check_writable, console, errors, table

if TYPE_CHECKING:
    from thinwire.tools.script.messages import Ended, Job, Reported


def run(
    script: Annotated[str, typer.Argument(help="Your training script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="All that follows is for the script.", show_default=False)
    ] = None,
    method: Annotated[str, typer.Option("--method", help='Such as "qsgd(bits=4)", or "auto".')] = "auto",
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes on this machine; not under torchrun. Default: 2."),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    link: Annotated[
        str, typer.Option(help='Emulate a link: "50mbit,latency=5ms"; "lab:50mbit" is a real one.')
    ] = "none",
    json: Annotated[Path, typer.Option(help="The file for the summary.")] = Path("out/run.json"),
) -> None:
    """Run your training script as it is, with every DistributedDataParallel model attached to a method.

    On this machine: thinwire run --method "qsgd(bits=4)" --nproc 4 train.py ARGS

    On several: torchrun ... -m thinwire run --method "qsgd(bits=4)" train.py ARGS
    """
    with errors():
        from thinwire.tools.script.messages import Job

        launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        if launched and nproc is not None:
            raise ConfigError("torchrun has started the workers: leave out --nproc")
        first = not launched or os.environ["RANK"] == "0"
        if first:
            check_writable(json, "--json")
        job = Job(
            script=check_script(script, module=module),
            module=module,
            arguments=tuple(arguments or ()),
            method=check_method(method),
            link=link,
        )
        ended = _here(job) if launched else _launch(job, nproc or 2)
    if first:
        _show(job, ended, json)


def check_script(script: str, *, module: bool) -> str:
    """The script, if it is there."""
    if not module and not Path(script).exists():
        hint = " (the options of thinwire run come before it)" if script.startswith("-") else ""
        raise ConfigError(f"there is no script {script}{hint}")
    return script


def check_method(text: str) -> str:
    """The method in full."""
    from thinwire.hosts.scripts import AUTO
    from thinwire.methods.registry import parse

    return text if text.strip() == AUTO else str(parse(text))


def _here(job: Job) -> Ended:
    """Under torchrun: this process is a worker."""
    from thinwire.net import link
    from thinwire.tools.script.worker import work

    if link.parse(job.link).lab:
        raise ConfigError("--link: workers that are started already cannot move to a lab: leave out lab:")
    return work(job)


def _launch(job: Job, workers: int) -> Ended:
    from thinwire.tools.lab.hosts import hosts_for
    from thinwire.tools.script.launch import launch
    from thinwire.tools.script.messages import Ended

    found: list[Ended] = []

    def note(rank: int, message: Reported) -> None:
        if rank == 0 and isinstance(message, Ended):
            found.append(message)

    with hosts_for(job.link, workers) as hosts:
        failed = launch(job, workers, note, hosts=hosts)
    if failed is not None:
        sys.stdout.flush()
        how = f"failed:\n{failed.text}" if failed.text else f"left with exit code {failed.code}"
        typer.echo(f"thinwire: worker {failed.rank} {how}", err=True)
        raise typer.Exit(failed.code)
    return found[0]


def _show(job: Job, ended: Ended, path: Path) -> None:
    import msgspec

    from thinwire.tools import units

    details = ("layers", "shapes")
    written = {
        "script": job.script,
        "arguments": job.arguments,
        "asked": job.method,
        "link": job.link,
        **msgspec.to_builtins(ended),
        "models": [
            {name: value for name, value in msgspec.to_builtins(one).items() if name not in details}
            for one in ended.models
        ],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")
    if not ended.models:
        typer.echo(
            "thinwire: the script trained no DistributedDataParallel model, so no method was at work: wrap "
            "the model in torch.nn.parallel.DistributedDataParallel",
            err=True,
        )
        return
    steps = f"{ended.steps:,} steps of {units.seconds(ended.step_seconds)}"
    table(
        f"{job.script}: {ended.workers} workers, {steps} in {units.seconds(ended.seconds)}; "
        "bytes, rounds and times are per step and worker",
        ("model", "method", "parameters", "sent", "received", "of dense", "rounds", "compress", "wait"),
        [
            (
                one.model,
                one.method,
                f"{one.parameters:,}",
                units.data(one.sent_bytes / max(one.steps, 1)),
                units.data(one.received_bytes / max(one.steps, 1)),
                units.percent(one.ratio_to_dense),
                f"{one.rounds / max(one.steps, 1):.2g}",
                units.seconds(one.compress_seconds_per_step),
                units.seconds(one.wait_seconds_per_step),
            )
            for one in ended.models
        ],
    )
    console().print(f"Summary: {path}", markup=False)
