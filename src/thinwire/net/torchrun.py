"""Under torchrun: who has died on this machine, said before torchrun ends the survivors.

torchrun looks at its processes ten times a second, and ends all of them if one has died. That leaves no time
for a roll call, and a survivor may be busy computing. So every rank watches the other ranks' processes on its
machine. The kernel wakes the thread that watches; nothing is asked again and again.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from thinwire import log

_ADVICE = (
    "With --max-restarts torchrun starts all ranks again, and a thinwire.Checkpointer goes on from the last "
    "checkpoint"
)
_VARIABLES = {"TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
_told: set[int] = set()
IN_ORDER = (0, signal.SIGINT)
"""How a process ends that has done its work, or was interrupted together with all others."""


def neighbours() -> list[int]:
    """The ranks that torchrun has started on this machine, this one included; none without torchrun."""
    if not hasattr(os, "pidfd_open") or not os.environ.keys() >= _VARIABLES:  # not on Linux, no torchrun
        return []
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    return list(range(first, first + int(os.environ["LOCAL_WORLD_SIZE"])))


def tell(ranks: Sequence[int], how: str) -> None:
    """Log who is gone, and how the run goes on, once; nothing without torchrun."""
    new = [rank for rank in ranks if rank not in _told]
    if new and "TORCHELASTIC_RUN_ID" in os.environ:
        _told.update(new)
        log.warning("rank %s %s. %s", ", ".join(map(str, new)), how, _ADVICE)


class Watch:
    """A thread that waits for the end of processes.

    Args:
        processes: their numbers, by rank; called in the thread.
        ended: called there with the rank and the status of its process, as `os.wait` has it; None if the
            parent has taken the status already.
    """

    def __init__(
        self, processes: Callable[[], dict[int, int]], ended: Callable[[int, int | None], None]
    ) -> None:
        self._processes = processes
        self._ended = ended
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="thinwire-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.shutdown(socket.SHUT_RDWR)  # closing alone would not do if a forked process has it as well
        self._stop.close()

    def _watch(self) -> None:
        poll, watched = select.poll(), dict[int, tuple[int, int]]()
        poll.register(self._stopped, select.POLLIN)
        with ExitStack() as opened:
            opened.enter_context(self._stopped)
            for rank, process in self._processes().items():
                try:
                    descriptor = os.pidfd_open(process)
                except ProcessLookupError:
                    self._ended(rank, None)
                except OSError as error:
                    log.warning("rank %d cannot be watched: %s", rank, error)
                else:
                    opened.callback(os.close, descriptor)
                    poll.register(descriptor, select.POLLIN)
                    watched[descriptor] = rank, process
            while self._stopped.fileno() not in (ready := [descriptor for descriptor, _ in poll.poll()]):
                for descriptor in ready:
                    poll.unregister(descriptor)
                statuses = {rank: _status(process) for rank, process in map(watched.pop, ready)}
                # If there are several, torchrun may have ended all but the first.
                first = {rank: status for rank, status in statuses.items() if status != signal.SIGTERM}
                for rank, status in (first or statuses).items():
                    self._ended(rank, status)


def _status(process: int) -> int | None:
    """How a process has ended, as long as its parent has not asked."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[0] == "Z" else None


def killed(status: int | None) -> bool:
    """Whether a process cannot have said anything about its end."""
    return status is not None and os.WIFSIGNALED(status)


def described(status: int | None) -> str:
    """ "was killed by SIGKILL" """
    if status is None:
        return "has ended"
    if killed(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"has ended with exit code {os.WEXITSTATUS(status)}"
