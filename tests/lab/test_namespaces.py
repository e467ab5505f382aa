"""The lab's network: it works, it is slow when told to be, and it leaves nothing behind."""

from __future__ import annotations

import subprocess

import pytest

from thinwire import ConfigError
from thinwire.tools.lab import namespaces


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    reason = namespaces.unavailable()
    if reason:
        pytest.skip(reason)


def names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def fail_inside(made: list[object]) -> None:
    with namespaces.network(2, rate="10mbit") as hosts:
        made += [hosts, hosts[0].start(["sleep", "60"])]
        assert hosts[0].name in names()
        raise ZeroDivisionError


def test_everything_is_removed_also_after_an_exception() -> None:
    made: list = []
    with pytest.raises(ZeroDivisionError):
        fail_inside(made)
    hosts, sleeper = made
    assert sleeper.poll() is not None
    assert all(host.name not in names() for host in hosts)


def test_what_a_host_cannot_have_is_an_error_and_leaves_nothing() -> None:
    before = names()
    for wrong, options in (
        ("not a rate", {"rate": "fast"}),
        ("limits rates only", {"rate": "1mbit,latency=1ms"}),
    ):
        with pytest.raises(ConfigError, match=wrong), namespaces.network(1, **options):
            pass
    with pytest.raises(namespaces.LabError, match="tc"), namespaces.network(1, rate="1bit"):
        pass
    assert names() == before
