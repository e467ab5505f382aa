"""Hosts of the lab for worker processes, where a link asks for them."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager

from thinwire.net.link import Links, parse
from thinwire.tools.lab.namespaces import Host, network
from thinwire.tools.lab.signals import leaving_by


@contextmanager
def hosts_for(links: str | Links, workers: int) -> Generator[list[Host] | None, None, None]:
    """The hosts that `launch.run_local` shall use: new ones for a link of the lab, otherwise None.

    They are removed at the end, also if that comes by an exception, Ctrl-C, SIGTERM or SIGHUP.
    """
    asked = parse(links)
    if not asked.lab:
        asked.of(workers)
        yield None
        return
    with leaving_by(signal.SIGTERM, signal.SIGHUP), network(workers, links=asked) as hosts:
        yield hosts
