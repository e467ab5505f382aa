"""Checkpoints, checked against a declaration: every difference is named before anything is changed.

A schema maps each field to a check. All of its fields are required:

    SCHEMA = {"step": whole(), "scale": positive(), "error": tensor(like)}
    check(SCHEMA, given)                      # StateError names the first field that does not fit

A sealed state has a checksum of every tensor and of everything else in each field, so that a flipped bit, or
an entry that is optional and was lost, is noticed as well:

    sealed = seal(state)                      # the state, and its "checksums"
    verify(sealed)                            # StateError names the first field that was changed since
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from thinwire.errors import StateError

Check = Callable[[object, str], None]
"""Raises StateError if a value does not fit; the text names it, such as "the checkpoint's step"."""
Schema = Mapping[str, Check]
WHOLE = "the checkpoint"


def check(schema: Schema, given: object, what: str = WHOLE) -> Mapping[str, Any]:
    """`given`, if it has all fields of the schema and each fits."""
    if not isinstance(given, Mapping):
        raise (
            _not_a_state(given)
            if what == WHOLE
            else StateError(f"{what} must be a mapping, not {described(given)}")
        )
    found = cast("Mapping[str, Any]", given)
    missing = [key for key in schema if key not in found]
    if missing:
        raise StateError(f"{_incomplete(what)}: it has no {missing[0]!r}")
    for key, fits in schema.items():
        fits(found[key], f"{what}'s {key}")
    return found


def exactly(schema: Schema, given: object, what: str = WHOLE) -> Mapping[str, Any]:
    """`given`, if it has the fields of the schema, each fits, and there are no others."""
    found = check(schema, given, what)
    unknown = [key for key in found if key not in schema]
    if unknown:
        raise StateError(f"{what} has a field {unknown[0]!r} that it should not have")
    return found


# -- checksums ---------------------------------------------------------------------------------------------


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with its checksums."""
    return {**state, "checksums": checksums(state)}


def verify(sealed: Mapping[str, Any], what: str = WHOLE) -> None:
    """Raise a StateError that names the first field that is not as it was sealed."""
    saved = sealed.get("checksums")
    if not isinstance(saved, Mapping):
        raise StateError(f"{what}'s checksums are {described(saved)}, not a mapping")
    stated = cast("Mapping[str, object]", saved)
    found = checksums({key: value for key, value in sealed.items() if key != "checksums"})
    # Tensors before the fields that hold them, so that the error names the smallest part.
    for path in sorted({*stated, *found}, key=lambda path: (-str(path).count(SEPARATOR), str(path))):
        if path not in found:
            raise StateError(f"{what} lacks {path!r}, which was saved in it")
        if path not in stated:
            raise StateError(f"{what} is damaged: {path!r} has no checksum")
        if type(stated[path]) is not int or stated[path] != found[path]:
            raise StateError(f"{what} is damaged: the checksum of {path!r} does not fit")


def opened(schema: Schema, given: object, what: str = WHOLE) -> Mapping[str, Any]:
    """A sealed state, if it is unharmed and fits the schema, which has a field "format"."""
    fields = {**schema, "checksums": mapping()}
    found = check(dict.fromkeys(fields, anything()), given, what)
    fields["format"](found["format"], f"{what}'s format")
    verify(found, what)
    return exactly(fields, found, what)


SEPARATOR = " / "


def checksums(state: Mapping[str, Any]) -> dict[str, int]:
    """CRC-32 of each tensor, by its path, and of all else in each field."""
    found: dict[str, int] = {}
    for field, value in state.items():
        text = _skeleton(value, str(field), found)
        found[str(field)] = zlib.crc32(text.encode("utf-8", "surrogatepass"))
    return found


def _skeleton(value: object, path: str, found: dict[str, int]) -> str:
    """A text for everything but the tensors; their checksums are put into `found`."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise StateError(f"{path!r} is not a plain dense tensor")
        found[path] = zlib.crc32(_bytes_of(value))
        return described(value)
    if isinstance(value, Mapping):
        items = sorted(cast("Mapping[object, object]", value).items(), key=lambda item: repr(item[0]))
        inside = (f"{key!r}: {_skeleton(each, f'{path}{SEPARATOR}{key}', found)}" for key, each in items)
        return "{" + ", ".join(inside) + "}"
    if isinstance(value, list | tuple):
        each = enumerate(cast("Sequence[object]", value))
        inside = (_skeleton(item, f"{path}{SEPARATOR}{number}", found) for number, item in each)
        return ("[{}]" if isinstance(value, list) else "({})").format(", ".join(inside))
    return repr(value)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))


# -- several states ----------------------------------------------------------------------------------------


def as_list(given: object) -> list[Mapping[str, Any]]:
    """One state, or several of them, as a list."""
    if isinstance(given, Mapping):
        return [cast("Mapping[str, Any]", given)]
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise _not_a_state(cast(object, given))
    states = list(cast("Sequence[Mapping[str, Any]]", given))
    if not states:
        raise StateError("no state was given: a rank without one of its own loads any with on_resize='drop'")
    return states


def _incomplete(what: str) -> str:
    return "this is not a thinwire checkpoint of this kind" if what == WHOLE else f"{what} is incomplete"


def _not_a_state(given: object) -> StateError:
    return StateError(f"a state is what state_dict() returned, or a list of such, not {described(given)}")


def same(states: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """Several states are loaded together only if they were saved at the same step."""
    first = states[0]
    for state in states[1:]:
        for key in keys:
            if state[key] != first[key]:
                raise StateError(f"the given states differ in their {key}: {first[key]} and {state[key]}")


# -- checks ------------------------------------------------------------------------------------------------


def equal(own: object, *, hint: str = "") -> Check:
    def fits(value: object, what: str) -> None:
        if type(value) is not type(own) or value != own:
            raise StateError(f"{what} is {value!r}, this session's is {own!r}{hint}")

    return fits


def version(own: int) -> Check:
    def fits(value: object, what: str) -> None:
        if type(value) is not int or value != own:
            raise StateError(
                f"{what} is {value!r}, this version reads {own}: another thinwire version wrote it"
            )

    return fits


def whole(lowest: int = 0) -> Check:
    def fits(value: object, what: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise StateError(f"{what} is {value!r}, which cannot be: it is a whole number from {lowest} up")

    return fits


def positive() -> Check:
    def fits(value: object, what: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise StateError(f"{what} is {value!r}, which cannot be: it is a finite number above 0")

    return fits


def amount() -> Check:
    def fits(value: object, what: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise StateError(f"{what} is {value!r}, which cannot be: it is a finite number from 0 up")

    return fits


def flag() -> Check:
    def fits(value: object, what: str) -> None:
        if not isinstance(value, bool):
            raise StateError(f"{what} is {value!r}, which cannot be: it is True or False")

    return fits


def tensor(like: torch.Tensor, *, finite: bool = False) -> Check:
    """A tensor with the shape and type of `like`; with `finite` without NaN and infinity."""

    def fits(value: object, what: str) -> None:
        if (
            not isinstance(value, torch.Tensor)
            or (value.shape, value.dtype) != (like.shape, like.dtype)
            or value.layout != torch.strided
        ):
            raise StateError(f"{what} is {described(value)}, this session needs {described(like)}")
        if finite and not is_finite(value):
            raise StateError(f"{what} has entries that are not finite")

    return fits


def is_finite(value: torch.Tensor) -> bool:
    """The sum is quicker; only if it is not finite are the entries looked at."""
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())


def tensors(like: Mapping[str, torch.Tensor], *, complete: bool = True, finite: bool = False) -> Check:
    """Tensors by name, each like its counterpart; with `complete` none may be missing."""

    def fits(value: object, what: str) -> None:
        if not isinstance(value, Mapping):
            raise StateError(f"{what} is {described(value)}, not a mapping of tensors")
        found = cast("Mapping[str, object]", value)
        missing = [name for name in like if name not in found] if complete else []
        unknown = [name for name in found if name not in like]
        if missing or unknown:
            raise StateError(
                f"{what} lacks {missing[0]!r}"
                if missing
                else f"{what} has {unknown[0]!r}, which this session does not have"
            )
        for name, each in found.items():
            tensor(like[name], finite=finite)(each, f"{what} of {name!r}")

    return fits


def anything() -> Check:
    """Required, and checked elsewhere."""
    return lambda value, what: None


def mapping() -> Check:
    def fits(value: object, what: str) -> None:
        if not isinstance(value, Mapping):
            raise StateError(f"{what} is {described(value)}, not a mapping by parameter")

    return fits


def each(fits_one: Check) -> Check:
    """A mapping of names to values that each fit."""

    def fits(value: object, what: str) -> None:
        if not isinstance(value, Mapping):
            raise StateError(f"{what} is {described(value)}, not a mapping by name")
        for name, item in cast("Mapping[object, object]", value).items():
            if not isinstance(name, str):
                raise StateError(f"{what} has a name {name!r} that is not a text")
            fits_one(item, f"{what} of {name!r}")

    return fits


def listing(each: Check) -> Check:
    def fits(value: object, what: str) -> None:
        if not isinstance(value, list | tuple):
            raise StateError(f"{what} is {described(value)}, not a list")
        for number, item in enumerate(cast("Sequence[object]", value)):
            each(item, f"{what}[{number}]")

    return fits


def record(schema: Schema) -> Check:
    """A mapping with these fields and no others."""

    def fits(value: object, what: str) -> None:
        exactly(schema, value, what)

    return fits


def parameters(own: Sequence[Sequence[Any]]) -> Check:
    """A list of name, shape and type: the model that a checkpoint belongs to."""

    def fits(value: object, what: str) -> None:
        if not isinstance(value, list | tuple):
            raise StateError(f"{what} is {described(value)}, not a list")
        theirs = cast("Sequence[object]", value)
        for position in range(max(len(theirs), len(own))):
            saved = _parameter(theirs[position]) if position < len(theirs) else "nothing"
            mine = _parameter(own[position]) if position < len(own) else "nothing"
            if saved != mine:
                raise StateError(
                    f"the checkpoint is of another model: parameter number {position} is {saved} there and "
                    f"{mine} here"
                )

    return fits


def _parameter(entry: object) -> str:
    parts = list(cast("Sequence[object]", entry)) if isinstance(entry, list | tuple) else [entry]
    return f"{parts[0]!r} {parts[1]} {parts[2]}" if len(parts) == 3 else repr(parts)


def described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
