"""Values in what a script prints."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from thinwire.errors import ConfigError


def read_patterns(texts: Sequence[str]) -> dict[str, str]:
    """Patterns by name. The name is the one of the group, or the text before it: "val_loss=([0-9.]+)"."""
    found: dict[str, str] = {}
    for text in texts:
        try:
            compiled = re.compile(text)
        except re.error as error:
            raise ConfigError(f"--metric: {text!r} is not a regular expression: {error}") from None
        if compiled.groups != 1:
            raise ConfigError(
                f"--metric: {text!r} has {compiled.groups} groups; one, in parentheses, finds the value: "
                "'val_loss=([0-9.]+)'"
            )
        name = next(iter(compiled.groupindex), None) or _words(text.partition("(")[0])
        if not name:
            raise ConfigError(
                f"--metric: {text!r} has no name: write it before the value, or name the group: "
                "'(?P<loss>[0-9.]+)'"
            )
        if name in found:
            raise ConfigError(f"--metric: {name} is given twice")
        found[name] = text
    return found


def _words(text: str) -> str:
    """Without the signs of regular expressions: "Test Loss:\\s*" is "Test Loss"."""
    return " ".join(re.findall(r"[\w./-]+", re.sub(r"\\[a-zA-Z]", " ", text)))


class Lines:
    """Passes text on, and finds values in its lines."""

    def __init__(
        self,
        stream: TextIO,
        patterns: Mapping[str, re.Pattern[str]],
        note: Callable[[dict[str, float]], None],
    ) -> None:
        self._stream = stream
        self._patterns = patterns
        self._note = note
        self._rest = ""

    def write(self, text: str) -> int:
        # Progress bars end their lines with a carriage return.
        *lines, self._rest = re.split(r"[\r\n]", self._rest + text)
        for line in lines:
            self._search(line)
        return self._stream.write(text)

    def finish(self) -> None:
        self._search(self._rest)
        self._rest = ""

    def _search(self, line: str) -> None:
        found: dict[str, float] = {}
        for name, pattern in self._patterns.items():
            for match in pattern.finditer(line):
                with contextlib.suppress(ValueError):  # "0.5." ends a sentence, "..." is none
                    found[name] = float(match[1].rstrip("."))
        if found:
            self._note(found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def watched_output(
    patterns: Mapping[str, str], note: Callable[[dict[str, float]], None]
) -> Generator[None, None, None]:
    """Meanwhile `note` is called with the values of every line that this process prints."""
    if not patterns:
        yield
        return
    compiled = {name: re.compile(text) for name, text in patterns.items()}
    before = sys.stdout, sys.stderr
    watched = [Lines(stream, compiled, note) for stream in before]
    sys.stdout, sys.stderr = watched  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for each in watched:
            each.finish()
        sys.stdout, sys.stderr = before
