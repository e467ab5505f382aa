"""The log: lines through `logging`, visible also in programs that did not set it up; and recorded values."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Mapping
from typing import Any

_log = logging.getLogger("thinwire")

Recorder = Callable[[Mapping[str, float], int | None], None]
_recorder: Recorder | None = None


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


def record(*, step: int | None = None, **values: Any) -> None:
    """Note values of your training script, such as a loss, for `thinwire run` and `thinwire compare`.

        thinwire.record(loss=loss.item(), accuracy=accuracy)

    Outside of these commands, and on all ranks but the first, it does nothing. Names are free.

    Args:
        step: the step that the values belong to; by default the number of optimizer steps so far.
        values: numbers, or tensors of one entry.
    """
    if _recorder is None:
        return
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"record: step is a number of steps, not {step!r}")
    _recorder({name: _number(name, value) for name, value in values.items()}, step)


def _number(name: str, value: Any) -> float:
    if hasattr(value, "item") and getattr(value, "size", None) is not None:  # of torch and numpy
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            raise TypeError(f"record: {name} is a tensor of several entries, not one number") from None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"record: {name} is a {type(value).__name__}, not a number")
    return float(value)


def use_recorder(recorder: Recorder | None) -> None:
    """From now on `record` passes its values to this function."""
    global _recorder  # noqa: PLW0603  one per process, like the logger
    _recorder = recorder
