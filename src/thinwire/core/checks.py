"""Validation of option values, with errors that say what is allowed."""

from __future__ import annotations

import math
from collections.abc import Collection

from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError


def ratio(method: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{method}: ratio must be a number above 0 and up to 1, not {value!r}")


def one_of(method: str, option: str, value: object, allowed: Collection[object]) -> None:
    if value not in allowed or isinstance(value, bool):
        raise ConfigError(f"{method}: {option} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def at_least(method: str, option: str, value: object, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(f"{method}: {option} must be a whole number from {lowest} up, not {value!r}")


def positive(method: str, option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{method}: {option} must be a finite number above 0, not {value!r}")


def not_negative(method: str, option: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{method}: {option} must be a finite number from 0 up, not {value!r}")


def momentum(method: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{method}: momentum must be a number from 0 up and below 1, not {value!r}")


def exchange(method: str, option: str, value: object) -> None:
    if not isinstance(value, Exchange):
        raise ConfigError(
            f"{method}: {option} must be a method that averages tensors, such as QSGD(bits=4), not {value!r};"
            f" in a method string it stands without quotes: {method}({option}=qsgd(bits=4))"
        )


def flag(method: str, option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{method}: {option} must be True or False, not {value!r}")


def between(method: str, option: str, value: object, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ConfigError(f"{method}: {option} must be a whole number in {lowest}..{highest}, not {value!r}")
