"""`thinwire lab`, as a user runs it: jobs, failures, signals, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.tools.cli import app
from thinwire.tools.lab import labs, namespaces

NAME = f"test{os.getpid()}"


def call(*arguments: str):
    return CliRunner().invoke(app, ["lab", *arguments])


@pytest.fixture
def _lab() -> Generator[None, None, None]:
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)
    yield
    with contextlib.suppress(Exception):
        labs.down(NAME)


def our_labs() -> list[str]:
    """Not those that other processes have at the moment."""
    return [lab.name for lab in labs.find() if lab.name == NAME]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for arguments in (("up", "--name", NAME), ("run", "--hosts", "2", "--", "true")):
        result = call(*arguments)
        assert result.exit_code == 2
        assert result.output.strip() == "thinwire: the lab cannot be built: network namespaces need root"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("up", "--rate", "fast"), "'fast' is not a rate"),
        (("up", "--hosts", "0"), "from 1 to 250 hosts, not 0"),
        (("up", "--name", "My Lab"), "a lab's name is a lower-case word"),
        (("up", "--hosts", "2", "--rate", "1mbit;2:2mbit"), "there is no rank 2 among 2 workers"),
        (("down", "--name", "nosuchlab"), "there is no lab 'nosuchlab'"),
        (("run", "--name", "nosuchlab", "--", "true"), "there is no lab 'nosuchlab'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(arguments: tuple[str, ...], expected: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert expected in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.usefixtures("_lab")
def test_up_run_status_down() -> None:
    assert (
        call("up", "--name", NAME, "--hosts", "2", "--rate", "100mbit;1:up=20mbit,down=50mbit").exit_code == 0
    )
    assert "is there already" in call("up", "--name", NAME).output
    script = (
        "echo rank $RANK of $WORLD_SIZE local $LOCAL_RANK at $MASTER_ADDR:$MASTER_PORT on $GLOO_SOCKET_IFNAME"
    )
    result = call("run", "--name", NAME, "--port", "1234", "--", "sh", "-c", script)
    assert result.exit_code == 0
    assert sorted(result.output.splitlines()) == [
        f"[h{rank}] rank {rank} of 2 local 0 at 10.77.0.1:1234 on eth0" for rank in range(2)
    ]
    (state,) = [one for one in json.loads(call("status", "--json").output) if one["name"] == NAME]
    assert [(host["up"], host["down"]) for host in state["hosts"]] == [(10**8, 10**8), (2 * 10**7, 5 * 10**7)]
    assert [host["address"] for host in state["hosts"]] == ["10.77.0.1", "10.77.0.2"]
    assert f"lab {NAME} (standing)" in call("status").output
    assert call("down", "--name", NAME).output == f"removed lab {NAME} with 2 hosts\n"
    assert our_labs() == []


@pytest.mark.usefixtures("_lab")
def test_the_first_failure_ends_the_others_and_gives_the_exit_code() -> None:
    begin = time.monotonic()
    script = "if [ $RANK = 1 ]; then echo I fail >&2; exit 7; fi; sleep 60"
    result = call("run", "--hosts", "3", "--", "sh", "-c", script)
    assert result.exit_code == 7
    assert "[h1] I fail" in result.output
    assert time.monotonic() - begin < 30
    killed = call("run", "--hosts", "1", "--", "sh", "-c", "kill -KILL $$")
    assert killed.exit_code == 128 + signal.SIGKILL
    assert call("run", "--hosts", "1", "--", "no-such-program").exit_code != 0


def lasting_job(folder: str) -> None:
    """A job that would last and does not listen to SIGTERM, in a lab of its own."""
    note = f"echo $$ > {folder}/$RANK.new; mv {folder}/$RANK.new {folder}/$RANK"
    app(["lab", "run", "--hosts", "2", "--", "sh", "-c", f"trap '' TERM; {note}; sleep 300 & wait; wait"])


def started(process: BaseProcess, folder: Path) -> tuple[str, list[int]]:
    """Its lab, and what runs inside."""
    until(lambda: all((folder / str(rank)).exists() for rank in range(2)), 60.0)
    (lab,) = [one.name for one in labs.find() if one.owner == process.pid]
    return lab, [int((folder / str(rank)).read_text()) for rank in range(2)]


def alive(process: int) -> bool:
    text = Path(f"/proc/{process}/stat")
    return text.exists() and text.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.usefixtures("_lab")
def test_signals_leave_nothing_behind_and_a_crash_leaves_what_down_removes(tmp_path: Path) -> None:
    folders = {number: tmp_path / number.name for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)}
    for folder in folders.values():
        folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.tools.cli"])
    processes = {
        number: context.Process(target=lasting_job, args=(str(folder),)) for number, folder in folders.items()
    }
    for process in processes.values():
        process.start()
    jobs = {number: (process, *started(process, folders[number])) for number, process in processes.items()}
    stranger = f"stranger{os.getpid()}"
    namespaces.ip("netns", "add", stranger)
    try:
        for number, (process, _, _) in jobs.items():
            os.kill(process.pid, number)
        for number, (process, lab, inside) in jobs.items():
            process.join(30)
            assert process.exitcode == (-number if number == signal.SIGKILL else 128 + number)
            until(lambda inside=inside: not any(map(alive, inside)))
            found = [one for one in labs.find() if one.name == lab]
            assert [one.owner for one in found] == ([None] if number == signal.SIGKILL else [])
        with namespaces.network(1) as (mine,):
            result = call("down", "--name", jobs[signal.SIGKILL][1])
            assert result.exit_code == 0, result.output
            in_use = call("down", "--name", mine.name.removeprefix("thinwire-").rpartition("-")[0])
            assert "which is running: end that first" in in_use.output
            assert mine.name in namespaces.namespaces()
        assert jobs[signal.SIGKILL][1] not in [one.name for one in labs.find()]
        assert stranger in namespaces.namespaces()
    finally:
        namespaces.remove(stranger)
