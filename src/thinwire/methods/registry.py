"""The names of methods: built-in ones, and those that other packages offer as entry points.

Exchanges (how a tensor is averaged) have the entry point group `thinwire.methods`, and schedules (when
parameters are averaged) have `thinwire.schedules`. Both have method strings and JSON of the same form, and no
name is used twice. All methods are loaded when they are asked for, built-in ones too.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any, TypeVar, cast

from thinwire.core.config import Configured
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError

# A new method is a file and a line here: its name, its module and its class.
EXCHANGES = {
    "dense": "thinwire.methods.dense:Dense",
    "fp16": "thinwire.methods.half:FP16",
    "bf16": "thinwire.methods.half:BF16",
    "heavyball": "thinwire.methods.heavyball:HeavyBall",
    "topk": "thinwire.methods.topk:TopK",
    "gaussiank": "thinwire.methods.gaussiank:GaussianK",
    "randomk": "thinwire.methods.randomk:RandomK",
    "threshold": "thinwire.methods.threshold:Threshold",
    "dgc": "thinwire.methods.dgc:DGC",
    "demo": "thinwire.methods.demo:DeMo",
    "scalecom": "thinwire.methods.scalecom:ScaleCom",
    "sketched": "thinwire.methods.sketched:Sketched",
    "randomblock": "thinwire.methods.randomblock:RandomBlock",
    "qsgd": "thinwire.methods.qsgd:QSGD",
    "terngrad": "thinwire.methods.terngrad:TernGrad",
    "natural": "thinwire.methods.natural:Natural",
    "signsgd": "thinwire.methods.signsgd:SignSGD",
    "efsign": "thinwire.methods.efsign:EFSign",
    "onebit": "thinwire.methods.onebit:OneBit",
    "gspar": "thinwire.methods.gspar:GSpar",
    "powersgd": "thinwire.methods.powersgd:PowerSGD",
    "a2sgd": "thinwire.methods.a2sgd:A2SGD",
    "lag": "thinwire.methods.lag:LAG",
    "laq": "thinwire.methods.laq:LAQ",
    "slaq": "thinwire.methods.slaq:SLAQ",
    "lasg": "thinwire.methods.lasg:LASG",
    "adam": "thinwire.methods.adam:Adam",
    "ef21": "thinwire.methods.ef21:EF21",
    "warmup": "thinwire.methods.warmup:Warmup",
    "route": "thinwire.methods.route:Route",
    "hierarchical": "thinwire.methods.hierarchical:Hierarchical",
    "delayed": "thinwire.methods.delayed:Delayed",
}
SCHEDULES = {
    "localsgd": "thinwire.averaging.localsgd:LocalSGD",
    "spasgd": "thinwire.averaging.spasgd:SPASGD",
    "pqasgd": "thinwire.averaging.pqasgd:PQASGD",
    "diloco": "thinwire.averaging.diloco:DiLoCo",
    "postlocal": "thinwire.averaging.postlocal:PostLocal",
    "sparseloco": "thinwire.averaging.sparseloco:SparseLoCo",
    "periodic": "thinwire.averaging.periodic:Periodic",
}
EXCHANGE_GROUP = "thinwire.methods"
SCHEDULE_GROUP = "thinwire.schedules"

Given = str | Mapping[str, Any]
Kind = TypeVar("Kind", bound=Configured)


def list_methods() -> dict[str, type[Exchange]]:
    """All exchanges by name: methods that average a tensor in every step."""
    return {name: _load(EXCHANGES[name], Exchange) for name in EXCHANGES} | _offered(EXCHANGE_GROUP, Exchange)


def list_schedules() -> dict[str, type[Configured]]:
    """All schedules by name: methods that average parameters periodically."""
    built_in = {name: _load(SCHEDULES[name], Configured) for name in SCHEDULES}
    return built_in | _offered(SCHEDULE_GROUP, Configured)


def parse(method: Given | Configured) -> Configured:
    """The method for a method string, its JSON form, its repr, or itself: all that `attach` accepts.

    >>> parse("qsgd(bits=4)")
    QSGD(bits=4, bucket=512, norm='max', rotate=False, reduce='auto')
    >>> parse(to_json(parse("qsgd(bits=4)"))) == parse("QSGD(bits=4)")
    True
    >>> str(parse("periodic(every=4, exchange=topk(values=qsgd(bits=8)))"))
    'periodic(every=4, exchange=topk(ratio=0.01, values=qsgd(bits=8)))'
    """
    if isinstance(method, Configured):
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
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        raise _not_a_method(text) from None
    return _from_tree(tree, text)


def parse_exchange(method: Given | Configured) -> Exchange:
    """Like `parse`, for methods that average tensors. A schedule is refused."""
    found = parse(method)
    if not isinstance(found, Exchange):
        raise ConfigError(
            f"{found.name} averages parameters periodically and is not an exchange: give it to "
            "thinwire.attach(model, ..., optimizer=optimizer)"
        )
    return found


def to_json(method: Configured) -> str:
    return json.dumps(_to_json(method))


def build(name: str, options: Mapping[str, Any]) -> Configured:
    """The method with this name or class name, and these options."""
    cls = _find(name)
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


# -- finding classes ---------------------------------------------------------------------------------------


def _find(name: str) -> type[Configured]:
    built_in = EXCHANGES | SCHEDULES
    by_class = {target.partition(":")[2]: target for target in built_in.values()}
    target = built_in.get(name) or by_class.get(name)
    if target is not None:
        return _load(target, Configured)
    others: dict[str, type[Configured]] = {
        **_offered(EXCHANGE_GROUP, Exchange),
        **_offered(SCHEDULE_GROUP, Configured),
    }
    for cls in others.values():
        if name in (cls.name, cls.__name__):
            return cls
    known = [*built_in, *others]
    raise ConfigError(
        f"unknown method {name!r}{_nearest(name, known)}; valid methods: {', '.join(sorted(known))}"
    )


def _load(target: str, kind: type[Kind]) -> type[Kind]:
    module, _, name = target.partition(":")
    return cast("type[Kind]", getattr(importlib.import_module(module), name))


def _offered(group: str, kind: type[Kind]) -> dict[str, type[Kind]]:
    """What other packages register under an entry point group."""
    found: dict[str, type[Kind]] = {}
    for entry in entry_points(group=group):
        if entry.name in EXCHANGES or entry.name in SCHEDULES or entry.name in found:
            raise ConfigError(
                f"entry point {entry.value!r} registers the method {entry.name!r}, which exists already"
            )
        loaded = entry.load()
        if not (isinstance(loaded, type) and issubclass(loaded, kind)):
            raise ConfigError(
                f"entry point {entry.value!r} ({entry.name}) is not a thinwire {kind.__name__} class"
            )
        found[entry.name] = cast(Any, loaded)
    return found


# -- reading and writing -----------------------------------------------------------------------------------


def _from_tree(tree: ast.expr, text: str) -> Configured:
    """`name(key=value, ...)`: parsed as Python, never evaluated. A value may be a method itself."""
    match tree:
        case ast.Name(name):
            return build(name, {})
        case ast.Call(ast.Name(name), positional, keywords):
            _find(name)
        case _:
            raise _not_a_method(text)
    if positional:
        raise ConfigError(f"{text!r}: options are given by name, like {name}(ratio=0.01)")
    options: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg is None:
            raise _not_a_method(text)
        options[keyword.arg] = _value(keyword.value, keyword.arg, text)
    return build(name, options)


def _not_a_method(text: str) -> ConfigError:
    return ConfigError(f"{text!r} is not a method: write it like topk(ratio=0.01)")


def _value(tree: ast.expr, option: str, text: str) -> object:
    if isinstance(tree, ast.Name | ast.Call):
        return _from_tree(tree, text)
    if isinstance(tree, ast.Tuple | ast.List):
        return tuple(_value(part, option, text) for part in tree.elts)
    try:
        return ast.literal_eval(tree)
    except ValueError:
        raise ConfigError(
            f"{text!r}: the value of {option} is not a number, string, True, False, None or a method"
        ) from None


def _from_mapping(given: Mapping[str, Any]) -> Configured:
    name, options = given.get("name"), given.get("options", {})
    if not isinstance(name, str) or not isinstance(options, Mapping) or set(given) - {"name", "options"}:
        raise ConfigError(f'a method in JSON is {{"name": ..., "options": {{...}}}}, not {dict(given)!r}')
    read = {key: _from_json(value) for key, value in cast("Mapping[str, Any]", options).items()}
    return build(name, read)


def _from_json(value: object) -> object:
    if isinstance(value, Mapping):
        return _from_mapping(cast("Mapping[str, Any]", value))
    if isinstance(value, list):
        return tuple(_from_json(part) for part in cast("list[object]", value))
    return value


def _to_json(value: object) -> object:
    if isinstance(value, Configured):
        options = {key: _to_json(option) for key, option in value.options().items()}
        return {"name": value.name, "options": options}
    if isinstance(value, tuple):
        return [_to_json(part) for part in cast("Sequence[object]", value)]
    return value


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""
