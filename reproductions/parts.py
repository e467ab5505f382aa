"""Parts of a run that are computed once: a run that was stopped continues, and several run side by side."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast, get_type_hints

import msgspec

from thinwire.errors import ConfigError
from thinwire.tools.workloads import Dataset

P = ParamSpec("P")
Key = TypeVar("Key")
Value = TypeVar("Value")
Progress = Callable[[str, int, int, float], None]
"""Is told what was computed, how many parts of how many are finished, and the seconds that it took."""
RECORDS = Path(__file__).with_name("records")


class NotRunError(Exception):
    """Some parts have not been computed, and nothing is to be computed now."""

    def __init__(self, done: int, total: int) -> None:
        super().__init__(f"{done} of {total} parts are finished")
        self.done = done
        self.total = total


class Part(msgspec.Struct, Generic[Value]):
    """The value of a function, the call that made it, and the CPU seconds that it took in this process."""

    call: str
    seconds: float
    value: Value


def described(value: object) -> str:
    """The text of an argument.

    A dataclass leaves out fields with `repr=False`, such as folders, and those that have their default, so
    that a new field does not change the name of an old part.
    """
    if isinstance(value, Dataset):
        return f"{value.name} {len(value.inputs)}"
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if f.repr}
        usual = {f.name: f.default for f in fields(value)}
        options = (f"{name}={described(own)}" for name, own in given.items() if own != usual[name])
        return f"{type(value).__name__}({', '.join(options)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(described, cast('tuple[object, ...]', value)))})"
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    raise TypeError(f"{type(value).__name__} does not describe itself: it cannot be an argument of a part")


def call_of(part: partial[Any]) -> str:
    """The call as text: it names the part, on every machine alike."""
    given = [described(value) for value in part.args]
    given += [f"{name}={described(value)}" for name, value in part.keywords.items()]
    return f"{part.func.__module__}.{part.func.__qualname__}({', '.join(given)})"


class Context:
    """What a reproduction is given: where the data are, how much to do, and a memory of what is done.

    Every finished part is a JSON file. A run that was stopped continues after the last one, and processes
    with the same folder share the work: who computes a part holds its lock.

    Args:
        name: of the reproduction.
        data: the folder with the datasets.
        quick: a smoke run.
        out: where outcomes, plots and locks go; parts, too, if there are no `records`.
        records: a folder with parts that this run continues.
        finished: compute nothing; a part that is missing is a `NotRunError`.
        progress: is told of every part that was computed.
    """

    def __init__(
        self,
        name: str,
        *,
        data: Path | None,
        quick: bool,
        out: Path,
        records: Path | None = None,
        finished: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.name = name
        self.quick = quick
        self.folder = folder(name, quick, out)
        self.finished = finished
        self._data = data
        self._progress = progress
        self._parts = self.folder / "parts" if records is None else records / name
        self._locks = out / "locks"
        for place in (self.folder, self._parts, self._locks):
            place.mkdir(parents=True, exist_ok=True)

    def as_finished(self) -> Context:
        """The same, but nothing is computed."""
        other = copy.copy(self)
        other.finished = True
        return other

    @property
    def data(self) -> Path:
        """The folder with the datasets."""
        if self._data is None:
            raise ConfigError("this reproduction reads real datasets: say where they are with --data DIR")
        return self._data

    @property
    def has_data(self) -> bool:
        return self._data is not None

    def once(self, function: Callable[P, Value], *args: P.args, **kwargs: P.kwargs) -> Value:
        """`function(*args, **kwargs)`, computed now or read from an earlier run with equal arguments.

        The function declares its result with a type that msgspec knows. What the result depends on must be
        among the arguments, because only they tell one part from another; see `described`.
        """
        return self.each({"": partial(function, *args, **kwargs)}, function.__name__)[""]

    def each(
        self, parts: Mapping[Key, partial[Value]], what: str = "", *, alone: bool = False
    ) -> dict[Key, Value]:
        """`once` for every part; `what` they are, and their keys, are told.

        With `alone` no other part is computed meanwhile, by no process: for parts that measure time.
        """
        missing = [key for key, part in parts.items() if not self._path(call_of(part)).exists()]
        if missing and self.finished:
            raise NotRunError(len(parts) - len(missing), len(parts))
        # For all of them at once: others would begin long parts between two short ones.
        with _locked(self._locks / "machine") if missing and alone else nullcontext():
            self._compute_all(parts, missing, what, alone=alone)
        return {key: self._read(part) for key, part in parts.items()}

    def _compute_all(
        self, parts: Mapping[Key, partial[Value]], missing: list[Key], what: str, *, alone: bool
    ) -> None:
        # First what nobody else computes, then wait for the others.
        for wait in (False, True):
            for key in missing:
                seconds = self._compute(parts[key], wait=wait, alone=alone)
                if seconds is not None and self._progress is not None:
                    words = cast("tuple[object, ...]", key) if isinstance(key, tuple) else (key,)
                    done = sum(self._path(call_of(part)).exists() for part in parts.values())
                    self._progress(" ".join((what, *map(str, words))).strip(), done, len(parts), seconds)

    def _path(self, call: str) -> Path:
        return self._parts / f"{hashlib.sha256(call.encode()).hexdigest()[:20]}.json"

    def _compute(self, part: partial[Any], *, wait: bool, alone: bool) -> float | None:
        """Compute a part and keep it; the seconds, or None if another process has it or had it.

        With `alone` this process holds the machine already.
        """
        call = call_of(part)
        path = self._path(call)
        with _locked(self._locks / path.stem, wait=wait) as mine:
            if not mine or path.exists():
                return None
            with nullcontext() if alone else _locked(self._locks / "machine", shared=True):
                began, spent = time.perf_counter(), time.process_time()
                made = Part(call, 0.0, part())
                took, made.seconds = time.perf_counter() - began, round(time.process_time() - spent, 2)
            unfinished = path.with_suffix(".partial")
            unfinished.write_text(json.dumps(msgspec.to_builtins(made)) + "\n")
            unfinished.replace(path)
        return took

    def _read(self, part: partial[Value]) -> Value:
        call = call_of(part)
        path = self._path(call)
        record: Any = Part[get_type_hints(part.func)["return"]]
        try:
            # The json of Python: infinite numbers and NaN are among the losses.
            found: Part[Value] = msgspec.convert(json.loads(path.read_bytes()), record, str_keys=True)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} cannot be read ({error}): remove it to compute it again") from None
        if found.call != call:
            raise ConfigError(f"{path} is the part {found.call}, not {call}: remove it")
        return found.value


@contextmanager
def _locked(path: Path, *, wait: bool = True, shared: bool = False) -> Generator[bool]:
    """Whether this process holds the lock; the system takes it from a process that ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def folder(name: str, quick: bool, out: Path) -> Path:
    """Where a reproduction keeps its outcome and its plots."""
    return out / (f"{name}-quick" if quick else name)
