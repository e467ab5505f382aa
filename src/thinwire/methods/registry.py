"""Names of methods: built-in ones, and those that other packages offer as entry points.

Exchanges (how a tensor is averaged) are found under `thinwire.methods`, schedules (when the replicas talk)
under `thinwire.schedules`. Both have method strings and JSON of the same form, and no name is used twice.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast

from thinwire.averaging.base import Schedule
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError

ENTRY_POINTS = "thinwire.methods"
SCHEDULE_ENTRY_POINTS = "thinwire.schedules"

Method = Exchange | Schedule
Kind = TypeVar("Kind", Exchange, Schedule)


def methods() -> dict[str, type[Exchange]]:
    """All exchanges by name; those of third parties are loaded here, not at import."""
    from thinwire.methods import BUILT_IN

    return _with_entry_points({method.name: method for method in BUILT_IN}, Exchange, ENTRY_POINTS)


def schedules() -> dict[str, type[Schedule]]:
    """All schedules by name: methods that average parameters from time to time."""
    from thinwire.averaging import BUILT_IN

    return _with_entry_points({method.name: method for method in BUILT_IN}, Schedule, SCHEDULE_ENTRY_POINTS)


def _with_entry_points(known: dict[str, type[Kind]], kind: type[Kind], group: str) -> dict[str, type[Kind]]:
    for entry in entry_points(group=group):
        if entry.name in known:
            raise ConfigError(
                f"entry point {entry.value!r} registers the method {entry.name!r}, which exists already"
            )
        loaded = entry.load()
        if not (isinstance(loaded, type) and issubclass(loaded, kind)):
            raise ConfigError(
                f"entry point {entry.value!r} ({entry.name}) is not a thinwire {kind.__name__} class"
            )
        known[entry.name] = cast(Any, loaded)
    return known


def parse(method: str | Mapping[str, Any] | Exchange) -> Exchange:
    """The exchange for a method string, its JSON form, its repr, or itself.

    >>> parse("qsgd(bits=4)")
    QSGD(bits=4, bucket=512, norm='max', reduce='auto')
    >>> parse(to_json(parse("qsgd(bits=4)"))) == parse("QSGD(bits=4)")
    True
    """
    found = parse_method(method)
    if isinstance(found, Schedule):
        raise ConfigError(
            f"{found.name} says when to talk, not how a tensor is averaged: give it to "
            "thinwire.attach(model, ..., optimizer=optimizer); here use what it is made of, "
            f"{str(found.inner)!r}"
        )
    return found


def parse_method(method: str | Mapping[str, Any] | Method) -> Method:
    """The same for exchanges and schedules: whatever `attach` takes.

    >>> parse_method("localsgd(every=4)").period
    4
    """
    if isinstance(method, Exchange | Schedule):
        return method
    if isinstance(method, Mapping):
        return _from_mapping(method)
    text = method.strip()
    if text.startswith("{"):
        try:
            loaded = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{text!r} is not valid JSON: {error}") from None
        return _from_mapping(cast("dict[str, Any]", loaded))
    name, options = _split(text)
    return build(name, options)


def to_json(method: Method) -> str:
    return json.dumps({"name": method.name, "options": method.options()})


def build(name: str, options: Mapping[str, Any]) -> Method:
    known: dict[str, type[Method]] = {**methods(), **schedules()}
    by_class = {cls.__name__: cls for cls in known.values()}
    cls = known.get(name) or by_class.get(name)
    if cls is None:
        raise ConfigError(
            f"unknown method {name!r}{_nearest(name, known)}; valid methods: {', '.join(sorted(known))}"
        )
    valid = [f.name for f in fields(cls)]
    for option in options:
        if option not in valid:
            listing = ", ".join(valid) if valid else "none"
            raise ConfigError(
                f"{cls.name} has no option {option!r}{_nearest(option, valid)}; valid options: {listing}"
            )
    try:
        return cls(**options)
    except TypeError as error:
        raise ConfigError(f"{cls.name}: {error}") from None


def _from_mapping(given: Mapping[str, Any]) -> Method:
    name, options = given.get("name"), given.get("options", {})
    if not isinstance(name, str) or not isinstance(options, Mapping) or set(given) - {"name", "options"}:
        raise ConfigError(f'a method in JSON is {{"name": ..., "options": {{...}}}}, not {dict(given)!r}')
    return build(name, cast("Mapping[str, Any]", options))


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """`name(key=literal, ...)`: parsed as Python, never evaluated."""
    wrong = ConfigError(f"{text!r} is not a method: write it like topk(ratio=0.01)")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        raise wrong from None
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise wrong
    if tree.args:
        raise ConfigError(f"{text!r}: options are given by name, like {tree.func.id}(ratio=0.01)")
    options: dict[str, Any] = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise wrong
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise ConfigError(
                f"{text!r}: the value of {keyword.arg} is not a number, string, True, False or None"
            ) from None
    return tree.func.id, options


def _nearest(word: str, known: Mapping[str, Any] | list[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""
