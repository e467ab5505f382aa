"""The lab's network: it works, it is slow when told to be, and it leaves nothing behind."""

from __future__ import annotations

import subprocess

import pytest

from thinwire.lab import namespaces


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


def test_a_rate_that_tc_does_not_know_is_its_own_error_and_leaves_nothing() -> None:
    before = names()
    with pytest.raises(namespaces.LabError, match="tc"), namespaces.network(1, rate="fast"):
        pass
    assert names() == before
