"""Which method to use for a model on a link: a prediction for each, and a recommendation with reasons."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from thinwire import predict
from thinwire.averaging.base import Schedule
from thinwire.core.config import Configured
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.adam import Adam
from thinwire.methods.hierarchical import Hierarchical
from thinwire.methods.registry import list_methods, list_schedules, parse, parse_exchange
from thinwire.net.costs import Link
from thinwire.predict import language
from thinwire.predict.buckets import Shapes
from thinwire.predict.timeline import USUAL
from thinwire.sessions.optimizer_checks import OptimizerKind, has_residual

# A method is recommended if it came this close to dense in our own table, in points of accuracy.
CLOSE_ENOUGH = 0.01
# And if it is at least this much faster: less is not worth an approximation.
WORTH_IT = 1.1
# Of the methods within this factor of the fastest, the most accurate one is taken.
ABOUT_AS_FAST = 1.15
LAYER = (1024, 1024)
# From so many workers on, layouts of two levels are predicted as well.
MANY_WORKERS = 256
# Between the groups of such a layout.
OUTER = ("dense", "qsgd(bits=4)", "topk(ratio=0.01)", "powersgd(rank=4)")
LONG_PERIOD = 64


@dataclass(frozen=True)
class Row:
    """The prediction for one method; seconds and bytes are per step and worker.

    `kept_back` says why it is not recommended whatever its speed; None if it may be. The step should take
    from `low` to `high` seconds.
    """

    method: str
    step_seconds: float
    low: float
    high: float
    speed_up: float
    break_even: predict.BreakEven
    sent_bytes: float
    received_bytes: float
    rounds: float
    compression_seconds: float
    kept_back: str | None


@dataclass(frozen=True)
class Plan:
    """Rows by predicted step time, the recommended method and the reasons for it.

    `failed` has the methods that could not be predicted, each with the reason; `cores` is None without a
    limit.
    """

    rows: tuple[Row, ...]
    recommended: str
    reasons: tuple[str, ...]
    parameters: int
    workers: int
    link: Link
    compute: float
    failed: dict[str, str] = field(default_factory=dict[str, str])
    cores: float | None = None
    deviation: float = 0.0
    overheads: predict.Overheads = USUAL

    def row(self, method: str) -> Row:
        return next(row for row in self.rows if row.method == method)

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["link"] = {
            "latency": self.link.latency,
            "up": _finite(self.link.up_bandwidth),
            "down": _finite(self.link.down_bandwidth),
            "jitter": self.link.jitter,
        }
        return record


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


Replicas = Literal["any", "equal"]
"""Whether replicas may differ between sync rounds."""


def candidates(
    optimizer: OptimizerKind = "plain SGD", *, replicas: Replicas = "any", workers: int = 2
) -> list[str]:
    """Every method at its defaults, but for those that consist of other methods.

    For an adaptive optimizer also what our table of a transformer recommends, such as `adam`. If replicas may
    differ between sync rounds, also methods that average parameters. For very many workers also layouts of
    two levels.
    """
    methods = [cls() for cls in list_methods().values()]
    found = [str(method) for method in methods if not _made_of_others(method)]
    if replicas == "any":
        found += [str(cls()) for cls in list_schedules().values()]
    if optimizer == "adaptive":
        found += [text for text in measured_methods() if replicas == "any" or is_exchange(text)]
    if workers >= MANY_WORKERS:
        found += two_level_layouts(workers, replicas)
    return list(dict.fromkeys(found))


def two_level_layouts(workers: int, replicas: Replicas = "any") -> list[str]:
    """Groups of about the root of the number of workers, with one leader each, and smaller ones."""
    root = 2 ** round(math.log2(workers) / 2)
    found: list[str] = []
    for local in sorted({root, max(2, root // 8)}):
        for outer in OUTER:
            both = f"hierarchical(outer={outer}, inner=fp16, local={local})"
            found.append(both)
            if replicas == "any":
                found.append(f"periodic(every={LONG_PERIOD}, exchange={both})")
    return [str(parse(text)) for text in found]


def is_exchange(text: str) -> bool:
    return isinstance(parse(text), Exchange)


def measured_methods() -> list[str]:
    """Methods that came close to dense with AdamW, on one level."""
    found = {text: parse(text) for text in language.close()}
    return [
        text
        for text, each in found.items()
        if isinstance(each, Schedule) or (isinstance(each, Exchange) and not each.traits.two_levels)
    ]


def measured_exchanges() -> list[str]:
    """Those of them that are for gradients or momenta."""
    return [text for text in measured_methods() if is_exchange(text)]


def _made_of_others(method: Exchange) -> bool:
    return any(isinstance(value, Exchange) for value in method.options().values())


def make_plan(
    shapes: Shapes,
    workers: int,
    link: Link,
    compute: predict.Compute | float = 0.0,
    chosen: Sequence[str] = (),
    *,
    host: predict.Host = "ddp",
    progress: Callable[[str], None] | None = None,
    bucket_bytes: int | None = None,
    optimizer: OptimizerKind = "plain SGD",
    replicas: Replicas = "any",
    cores: float = math.inf,
    overheads: predict.Overheads = USUAL,
    inside: Link | None = None,
    deviation: float = 0.0,
) -> Plan:
    """Predict every method (or those chosen, and dense) and recommend one.

    A method that fails is noted in the plan and the others go on; without dense there is no plan.

    Args:
        shapes: of the parameters by name.
        workers: two or more.
        link: of every worker.
        compute: seconds of a step without communication; 0 compares the communication alone.
        chosen: method strings; none: all, at their defaults.
        host: "ddp" or "average".
        progress: called with each method before it is measured.
        bucket_bytes: the limit of DDP's buckets, if it is not the default one.
        optimizer: its kind; some methods assume plain SGD, and residuals disturb an adaptive one.
        replicas: "equal" leaves out methods whose replicas differ between sync rounds.
        cores: the number of threads of a worker that run at full speed at the same time.
        overheads: what operations cost besides the link; `probe.calibrate` measures it.
        inside: the link inside a group of `hierarchical`; None: operations inside take no time.
        deviation: the standard deviation of a worker's step time, as a share of its mean.
    """
    if workers < 2:
        raise ConfigError(f"a plan needs two workers or more, not {workers}: one worker sends nothing")
    if "auto" in chosen:
        raise ConfigError("a plan compares methods: auto chooses by a plan itself, leave it out")
    asked = [str(parse(text)) for text in chosen] or candidates(optimizer, replicas=replicas, workers=workers)
    found: dict[str, predict.Profile | predict.PeriodicProfile] = {}
    failed: dict[str, str] = {}
    for method in dict.fromkeys(["dense", *asked]):
        if progress is not None:
            progress(method)
        try:
            found[method] = predict.profile_of(method, shapes, workers, host=host, bucket_bytes=bucket_bytes)
        except Exception as error:  # whatever it is: it must not cost the others their rows
            failed[method] = f"{type(error).__name__}: {error}"
            if method == "dense" and isinstance(error, ConfigError):
                raise
            if method == "dense":
                raise ThinwireError(
                    f"no prediction for dense, and so for no method: {failed[method]}"
                ) from error
    sites = predict.Sites(link, overheads, inside, workers)
    ranges = {
        method: own.interval(sites, compute, cores=cores, deviation=deviation)
        for method, own in found.items()
    }
    dense, dense_seconds = found["dense"], ranges["dense"].seconds
    rows: list[Row] = []
    for method, own in found.items():
        low, seconds, high = ranges[method]
        rows.append(
            Row(
                method,
                seconds,
                low,
                high,
                dense_seconds / seconds if seconds else 1.0,
                predict.break_even_of(
                    own, dense, compute, latency=link.latency, cores=cores, overheads=overheads
                ),
                own.sent_bytes + (own.inside_bytes if inside is not None else 0.0),
                own.received_bytes,
                own.rounds,
                own.compression_seconds,
                kept_back(method, own, optimizer=optimizer, replicas=replicas),
            )
        )
    rows.sort(key=lambda row: row.step_seconds)
    recommended, reasons = recommend(rows, optimizer)
    total = compute if isinstance(compute, int | float) else compute.seconds
    entries = sum(math.prod(shape) for shape in shapes.values())
    return Plan(
        tuple(rows),
        recommended,
        tuple(reasons),
        entries,
        workers,
        link,
        float(total),
        failed,
        _finite(cores),
        deviation,
        overheads,
    )


# -- what may be recommended -------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def proven() -> dict[str, float]:
    """Accuracy minus that of dense, by method: our table (`python -m benchmarks digits --steps 500`)."""
    record = json.loads(files("thinwire.predict").joinpath("digits.json").read_text())
    results: Sequence[Mapping[str, Any]] = record["results"]
    return {str(row["method"]): float(row["accuracy"] - results[0]["accuracy"]) for row in results}


@lru_cache(maxsize=1)
def recovered_on_digits() -> dict[str, float]:
    """The part of the gap between a worker alone and dense in that table; empty without a worker alone."""
    record = json.loads(files("thinwire.predict").joinpath("digits.json").read_text())
    results: Sequence[Mapping[str, Any]] = record["results"]
    found = {str(row["method"]): float(row["accuracy"]) for row in results}
    gap = found["dense"] - found.get("alone", found["dense"])
    return {} if gap <= 0 else {method: 1 - (found["dense"] - each) / gap for method, each in found.items()}


def kept_back(
    method: str,
    own: predict.Profile | predict.PeriodicProfile | None = None,
    *,
    optimizer: OptimizerKind = "plain SGD",
    replicas: Replicas = "any",
) -> str | None:
    """Why a method is not recommended, however fast it is."""
    parsed = parse(method)
    if isinstance(parsed, Schedule):
        return _schedule_kept_back(parsed, optimizer, replicas)
    exchange = parse_exchange(parsed)
    if isinstance(exchange, Hierarchical):  # the mean of a group, to half precision or exactly, then `outer`
        return kept_back(str(exchange.outer), own, optimizer=optimizer, replicas=replicas)
    traits = exchange.traits
    if traits.delayed:
        return _late_kept_back(exchange, optimizer)
    behind = proven().get(str(exchange))
    # A measurement with AdamW says more than a rule, and than digits with SGD.
    nats = language.behind().get(str(exchange)) if optimizer == "adaptive" else None
    reasons = {
        "replicas drift": not traits.consensus or exchange.reconcile_every is not None,
        "keeps the momentum itself": traits.optimizer == "no momentum",
        "needs AdamW": traits.optimizer == "Adam" and optimizer != "adaptive",
        "its rule is for plain SGD": traits.optimizer == "plain SGD" and optimizer != "plain SGD",
        "behind dense with AdamW in our table": nats is not None and nats > language.CLOSE_ENOUGH,
        "what it sends late disturbs an adaptive optimizer": optimizer == "adaptive"
        and nats is None
        and traits.optimizer != "Adam"
        and has_residual(exchange),
        "unproven in this form": exchange.warning is not None,
        "bytes vary with the gradients": own is not None and own.data_dependent,
        "not in our table": behind is None and nats is None,
        "behind dense in our table": nats is None and behind is not None and behind < -CLOSE_ENOUGH,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _schedule_kept_back(schedule: Schedule, optimizer: OptimizerKind, replicas: Replicas) -> str | None:
    if replicas == "equal":
        return "replicas differ between sync rounds"
    return _late_kept_back(schedule, optimizer)


def _late_kept_back(method: Configured, optimizer: OptimizerKind) -> str | None:
    """A method that averages parameters, or later, must have been measured itself with this optimizer.

    Its period or delay decides how it trains. It must also recover a good part of what the other workers
    bring: a worker that trains alone is late, too.
    """
    text, adaptive = str(method), optimizer == "adaptive"
    nats, behind = language.behind().get(text), proven().get(text)
    table = language.recovered() if adaptive else recovered_on_digits()
    known = nats if adaptive else behind
    part = table.get(text)
    reasons = {
        "not in our table": known is None,
        "behind dense with AdamW in our table": adaptive
        and nats is not None
        and nats > language.CLOSE_ENOUGH,
        "behind dense in our table": not adaptive and behind is not None and behind < -CLOSE_ENOUGH,
        "not compared with a worker alone in our table": part is None,
        "recovers less than half of the gap between a worker alone and dense": part is not None
        and part < language.LEAST_RECOVERED,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def recommend(rows: Sequence[Row], optimizer: OptimizerKind = "plain SGD") -> tuple[str, list[str]]:
    """The fastest method that has proven itself, or dense if it is hardly slower.

    For an adaptive optimizer methods that were measured with AdamW come first.
    """
    dense = next(row for row in rows if row.method == "dense")
    able = [row for row in rows if row.kept_back is None]
    nats: Mapping[str, float] = language.behind() if optimizer == "adaptive" else {}
    measured = [row for row in able if row.method in nats]
    if any(row.speed_up >= WORTH_IT for row in measured):
        able = measured

    def quality(row: Row) -> float:
        return -nats[row.method] if row.method in nats else proven()[_between(row.method)]

    fastest = min(able, key=lambda row: row.step_seconds)
    close = [row for row in able if row.step_seconds <= ABOUT_AS_FAST * fastest.step_seconds]
    best = max(close, key=lambda row: (row.method in nats, quality(row), -row.step_seconds))
    if best.method == "dense" or best.speed_up < WORTH_IT:
        second = min((row for row in able if row is not dense), key=lambda r: r.step_seconds, default=None)
        reasons = ["on this link dense is best"]
        if second is not None:
            ratio = second.step_seconds / dense.step_seconds
            reasons.append(
                f"a step with {second.method}, the fastest of the others, takes {ratio:.2f} times as long; "
                f"a gain of less than {100 * (WORTH_IT - 1):.0f} % is not worth an approximation"
            )
        return "dense", reasons
    differs = (
        f"in our table of a transformer with AdamW its loss differs from dense's by {nats[best.method]:+.3f}"
        if best.method in nats
        else "in our table its accuracy differs from dense's by "
        f"{100 * proven()[_between(best.method)]:+.1f} points"
    )
    equal = "all replicas stay equal" if is_exchange(best.method) else "replicas differ between sync rounds"
    reasons = [
        f"a step takes {duration(best.step_seconds)} ({duration(best.low)} to {duration(best.high)}) instead "
        f"of {duration(dense.step_seconds)}: {best.speed_up:.1f} times faster",
        f"it sends {100 * best.sent_bytes / max(1, dense.sent_bytes):.3g} % of dense's bytes "
        f"in {best.rounds:.3g} {'operation' if best.rounds == 1 else 'operations'}",
        f"{equal}; {differs}",
        *_warm_up(best.method, dense.step_seconds),
    ]
    if best.break_even.bandwidth is not None:
        reasons.append(f"it is faster than dense on links below {rate(best.break_even.bandwidth)}")
    faster = [row for row in rows if row.step_seconds < best.step_seconds and row.kept_back is not None]
    if faster:
        reasons.append(
            f"{faster[0].method} would be faster, but it is not recommended: {faster[0].kept_back}"
        )
    return best.method, reasons


def _warm_up(method: str, dense_step: float) -> list[str]:
    """What a method's exact steps cost before it begins to save."""
    parsed = parse(method)
    steps = parsed.warmup if isinstance(parsed, Adam) else 0
    if isinstance(parsed, Schedule) and parsed.gradient_warmup and parsed.warmup_exchange is None:
        steps = parsed.warmup
    if not steps:
        return []
    return [f"its first {steps} steps are like dense's and take {duration(steps * dense_step)}"]


def _between(method: str) -> str:
    """The method between groups, of one with two levels; otherwise itself."""
    parsed = parse(method)
    return str(parsed.outer) if isinstance(parsed, Hierarchical) else method


# -- words and numbers -------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def rate(bandwidth: float) -> str:
    """Bytes per second, written in bits per second."""
    bits = 8 * bandwidth
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def seconds_of(text: str) -> float:
    """ "50ms", "1.5s" or "200us"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s)\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a time: write a number and us, ms or s, such as 50ms")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def shapes_of(text: str) -> dict[str, tuple[int, ...]]:
    """ "1024x784,1024": the shapes of a model's parameters, in its order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number, part in enumerate(text.split(",")):
        if not re.fullmatch(r"\s*[1-9]\d*(\s*x\s*[1-9]\d*)*\s*", part):
            raise ConfigError(
                f"{part.strip()!r} is not a shape: write them like 1024x784,1024, layer after layer"
            )
        shapes[f"parameter {number}"] = tuple(int(length) for length in part.split("x"))
    return shapes


def described(shapes: Shapes) -> str:
    """ "layers: 23 of 1024 x 1024, 1 of 930 x 930": the shapes of a model, in words."""
    counted: dict[tuple[int, ...], int] = {}
    for shape in shapes.values():
        counted[tuple(shape)] = counted.get(tuple(shape), 0) + 1
    said = [f"{count:,} of {' x '.join(map(str, shape))}" for shape, count in counted.items()]
    return f"layers: {', '.join(said)}"


def layers_of(parameters: int) -> dict[str, tuple[int, ...]]:
    """Square layers of a thousand by a thousand, for a model of which only the size is known."""
    if parameters < 1:
        raise ConfigError(f"a model has one parameter or more, not {parameters}")
    whole, left = divmod(parameters, math.prod(LAYER))
    shapes: dict[str, tuple[int, ...]] = {f"layer {number}": LAYER for number in range(whole)}
    if left:
        columns = max(1, math.isqrt(left))
        shapes["last layer"] = (left // columns, columns)
        if left % columns:
            shapes["rest"] = (left % columns,)
    return shapes
