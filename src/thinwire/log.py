"""The log: through `logging`, and visible also in programs that did not set it up."""

from __future__ import annotations

import logging

_log = logging.getLogger("thinwire")


def info(text: str, *values: object) -> None:
    _make_visible()
    _log.info(f"thinwire: {text}", *values)


def warning(text: str, *values: object) -> None:
    _make_visible()
    _log.warning(f"thinwire: {text}", *values)


def _make_visible() -> None:
    if not _log.hasHandlers():  # a program without logging of its own must see these lines too
        _log.addHandler(logging.StreamHandler())
        _log.setLevel(logging.INFO)


def quiet() -> None:
    """Only warnings from now on, for a process whose results are shown elsewhere."""
    _make_visible()
    _log.setLevel(logging.WARNING)
