"""`thinwire lab`: hosts with slow links on this machine, to train on."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.tools.cli.show import AsJson, errors, print_json, table

if TYPE_CHECKING:
    from thinwire.tools.lab.labs import HostState, Lab

lab = typer.Typer(no_args_is_help=True, help="Hosts with real, slow links on this machine (needs root).")

Name = Annotated[str, typer.Option(help="The name of the lab; there can be several labs.")]
Rate = Annotated[
    str,
    typer.Option(
        help='The link of every host: "100mbit", "up=20mbit,down=100mbit", "100mbit;1:20mbit", "none".'
    ),
]


@contextmanager
def _lab_errors() -> Generator[None, None, None]:
    """Usage errors and failures of system commands are one line; signals run every `finally`."""
    from thinwire.tools.lab.signals import leaving_by

    with errors(), leaving_by(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@lab.command()
def up(
    hosts: Annotated[int, typer.Option(help="The number of hosts.")] = 4,
    rate: Rate = "100mbit",
    name: Name = "lab",
    as_json: AsJson = False,
) -> None:
    """Build a lab: network namespaces on a bridge, each link slowed by a token bucket."""
    from thinwire.tools.lab import labs

    with _lab_errors():
        labs.up(name, hosts, rate)
        (built,) = [one for one in labs.find() if one.name == name]
        _show([built], as_json)


@lab.command()
def status(as_json: AsJson = False) -> None:
    """List the labs of this machine and the bytes that each link has carried."""
    from thinwire.tools.lab import labs

    with _lab_errors():
        _show(labs.find(), as_json)


@lab.command()
def down(
    name: Annotated[str | None, typer.Option(help="Only this lab.")] = None,
    as_json: AsJson = False,
) -> None:
    """Remove labs and the processes in them, including what a crash left behind."""
    from thinwire.tools.lab import labs, namespaces

    with _lab_errors():
        reason = namespaces.unavailable() if labs.find() else None
        if reason:
            raise namespaces.LabError(f"labs cannot be removed: {reason}")
        removed = labs.down(name)
        if as_json:
            print_json([one.name for one in removed])
        for one in () if as_json else removed:
            typer.echo(f"removed lab {one.name} with {len(one.hosts)} hosts")
        if not removed and not as_json:
            typer.echo("no lab to remove")


@lab.command(context_settings={"ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(help="A program and its arguments, after --.")],
    hosts: Annotated[
        int | None, typer.Option(help="Build a lab with this many hosts for this job only.")
    ] = None,
    rate: Rate = "100mbit",
    name: Name = "lab",
    port: Annotated[
        int, typer.Option(help="The port of the first host, at which the ranks connect.")
    ] = 29500,
) -> None:
    """Run a command on every host of a lab at once, as torchrun does: thinwire lab run -- python train.py

    Each process gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME.
    The first process that fails ends the others, and its exit code becomes that of this command.
    """
    from thinwire.tools.lab import job, labs
    from thinwire.tools.lab.namespaces import Host, network

    def go(members: list[Host]) -> int:
        return job.run(members, command, lambda rank, line: typer.echo(f"[h{rank}] {line}"), port=port)

    with _lab_errors():
        if hosts is None:
            code = go(labs.get(name))
        else:
            with network(hosts, links=rate) as members:
                code = go(members)
        raise typer.Exit(code)


def _show(found: list[Lab], as_json: bool) -> None:
    from thinwire.tools.lab import labs

    states = {one.name: labs.state(one) for one in found}
    if as_json:
        record = [{"name": one.name, "kind": _kind(one), "hosts": states[one.name]} for one in found]
        print_json(record)
        return
    if not found:
        typer.echo("no lab on this machine; `thinwire lab up` builds one")
    for one in found:
        header = ("host", "address", "up", "down", "sent", "received", "processes")
        table(f"lab {one.name} ({_kind(one)})", header, [_row(host) for host in states[one.name]])


def _kind(one: Lab) -> str:
    if one.standing:
        return "standing"
    return "left over" if one.owner is None else f"of process {one.owner}"


def _row(host: HostState) -> tuple[str, ...]:
    rates = [f"{rate / 1e6:g} Mbit/s" if rate else "no limit" for rate in (host.up, host.down)]
    counted = [f"{count:,}" for count in (host.sent, host.received)]
    return (f"h{host.host}", host.address, *rates, *counted, str(len(host.processes)))
