"""Validation of option values, with errors that say what is allowed. Methods call it in `__post_init__`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, TypeGuard

from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError


def fraction(method: str, option: str, value: object) -> None:
    """A number above 0 and up to 1."""
    if not _is_number(value) or not 0 < value <= 1:
        raise ConfigError(f"{method}: {option} must be a number above 0 and up to 1, not {value!r}")


def ratio(method: str, value: object) -> None:
    """The option `ratio`: a number above 0 and up to 1."""
    fraction(method, "ratio", value)


def momentum(method: str, value: object, option: str = "momentum") -> None:
    """The option `momentum`, or another one of its kind: a number from 0 up and below 1."""
    if not _is_number(value) or not 0 <= value < 1:
        raise ConfigError(f"{method}: {option} must be a number from 0 up and below 1, not {value!r}")


def positive(method: str, option: str, value: object) -> None:
    """A finite number above 0."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ConfigError(f"{method}: {option} must be a finite number above 0, not {value!r}")


def not_negative(method: str, option: str, value: object) -> None:
    """A finite number from 0 up."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ConfigError(f"{method}: {option} must be a finite number from 0 up, not {value!r}")


def whole(method: str, option: str, value: object, lowest: int, highest: int | None = None) -> None:
    """A whole number from `lowest` up, or to `highest`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < lowest
        or (highest is not None and value > highest)
    ):
        to = "up" if highest is None else f"to {highest}"
        raise ConfigError(f"{method}: {option} must be a whole number from {lowest} {to}, not {value!r}")


def multiple(method: str, option: str, value: object, of: int) -> None:
    """A whole number that `of` divides, from `of` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < of or value % of:
        raise ConfigError(f"{method}: {option} must be a multiple of {of}, not {value!r}")


def one_of(method: str, option: str, value: object, allowed: Collection[object]) -> None:
    """One of the `allowed` values."""
    if value not in allowed or isinstance(value, bool):
        raise ConfigError(f"{method}: {option} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def scope(method: str, value: object) -> None:
    """The option `scope`: "tensor", "bucket" or "model"."""
    one_of(method, "scope", value, ("tensor", "bucket", "model"))


def flag(method: str, option: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{method}: {option} must be True or False, not {value!r}")


def exchange(method: str, option: str, value: object, *, two_levels: bool = False) -> None:
    """Another method that averages tensors; with `two_levels` also one that has two of them."""
    if not isinstance(value, Exchange):
        raise ConfigError(
            f"{method}: {option} must be a method that averages tensors, such as QSGD(bits=4), not {value!r};"
            f" in a method string it stands without quotes: {method}({option}=qsgd(bits=4))"
        )
    if value.traits.two_levels and not two_levels:
        raise ConfigError(
            f"{method}: {value.name} cannot be inside of another method: put {method} inside of it, "
            f"{value.name}(outer={method}(...))"
        )
    if value.traits.delayed:
        raise ConfigError(
            f"{method}: {value.name} cannot be inside of another method: put {method} inside of it, "
            f"{value.name}(method={method}(...)). A schedule has its own option, overlap"
        )


def optional(check: Callable[..., None], method: str, option: str, value: object, *limits: Any) -> None:
    """`check` unless the value is None."""
    if value is not None:
        check(method, option, value, *limits)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
