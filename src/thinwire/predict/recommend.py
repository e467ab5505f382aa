"""Which method to use for a model on a link: a prediction for each, and a recommendation with reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from thinwire import predict
from thinwire.averaging.base import Schedule
from thinwire.core.exchange import Exchange
from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.dense import Dense
from thinwire.methods.registry import list_methods, list_schedules, parse
from thinwire.methods.threshold import Threshold
from thinwire.net.costs import Link
from thinwire.predict import families, language
from thinwire.predict.buckets import Shapes
from thinwire.predict.evidence import Replicas, between, in_words, kept_back, loss_behind, proven
from thinwire.predict.timeline import USUAL
from thinwire.predict.warmup import warm_up_of
from thinwire.sessions.optimizer_checks import OptimizerKind

# A method is recommended if it is at least this much faster: less is not worth an approximation.
WORTH_IT = 1.1
# Of the methods within this factor of the fastest, the most accurate one is taken.
ABOUT_AS_FAST = 1.15
# Methods are compared by a run of so many steps, the warm-up included.
RUN_STEPS = 10_000
# Of a model of which only the size is known: the sides of a layer, and how many layers it should have.
LONGEST_SIDE, SHORTEST_SIDE = 1024, 256
LEAST_LAYERS = 16
# From so many workers on, layouts of two levels are predicted as well.
MANY_WORKERS = 256
# Between the groups of such a layout.
OUTER = ("dense", "qsgd(bits=4)", "topk(ratio=0.01)", "powersgd(rank=4)")
LONG_PERIOD = 64


@dataclass(frozen=True)
class Row:
    """The prediction for one method; seconds and bytes are per step and worker.

    The operations, those of `break_even` as well, are the ones that a session chooses on the plan's link.
    `kept_back` says why it is not recommended whatever its speed; None if it may be. The step should take
    from `low` to `high` seconds, and `computing_seconds` without communication. The first `warmup_steps` take
    `warmup_seconds` altogether. `derived`: `every` and `fragments` were chosen for this link.
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
    computing_seconds: float = 0.0
    warmup_steps: int = 0
    warmup_seconds: float = 0.0
    derived: bool = False

    @property
    def in_a_run(self) -> float:
        """Seconds per step of a run of `RUN_STEPS`, its warm-up included."""
        left = max(0, RUN_STEPS - self.warmup_steps)
        return (self.warmup_seconds + left * self.step_seconds) / (self.warmup_steps + left)


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


def candidates(
    optimizer: OptimizerKind = "plain SGD", *, replicas: Replicas = "any", workers: int = 2
) -> list[str]:
    """Every method at its defaults, but for those that consist of other methods, and `threshold`: what it
    sends depends on the scale of the gradients, which a plan does not know.

    For an adaptive optimizer also those of our table of a transformer that are of use, such as `adam`. If
    replicas may differ between sync rounds, also methods that average parameters. For very many workers also
    layouts of two levels.
    """
    methods = [cls() for cls in list_methods().values() if not issubclass(cls, Threshold)]
    found = [str(method) for method in methods if not _made_of_others(method)]
    if replicas == "any":
        found += [str(cls()) for cls in list_schedules().values()]
    if optimizer == "adaptive":
        measured = measured_methods(language.useful())
        found += [text for text in measured if replicas == "any" or is_exchange(text)]
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


def measured_methods(of: Sequence[str] | None = None) -> list[str]:
    """Methods that came close to dense with AdamW, or those given, on one level."""
    found = {text: parse(text) for text in (language.close() if of is None else of)}
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
    periodic: Sequence[families.Family] = (),
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
        periodic: families of periodic averaging, of each of which the setting for this link is added. There
            must be computing to hide the wire behind.
    """
    if workers < 2:
        raise ConfigError(f"a plan needs two workers or more, not {workers}: one worker sends nothing")
    if "auto" in chosen:
        raise ConfigError("a plan compares methods: auto chooses by a plan itself, leave it out")
    asked = [str(parse(text)) for text in chosen] or candidates(optimizer, replicas=replicas, workers=workers)
    total = float(compute if isinstance(compute, int | float) else compute.seconds)
    profile_of = partial(
        predict.profile_of, shapes=shapes, workers=workers, link=link, host=host, bucket_bytes=bucket_bytes
    )
    found: dict[str, predict.Profile | predict.PeriodicProfile] = {}
    failed: dict[str, str] = {}
    for method in dict.fromkeys(["dense", *asked]):
        if progress is not None:
            progress(method)
        try:
            found[method] = profile_of(method)
        except Exception as error:  # whatever it is: it must not cost the others their rows
            failed[method] = f"{type(error).__name__}: {error}"
            if method == "dense" and isinstance(error, ConfigError):
                raise
            if method == "dense":
                raise ThinwireError(
                    f"no prediction for dense, and so for no method: {failed[method]}"
                ) from error
    sites = predict.Sites(link, overheads, inside, workers)

    def interval(own: predict.Profile | predict.PeriodicProfile) -> predict.Interval:
        return own.interval(sites, compute, cores=cores, deviation=deviation)

    def shows(method: str) -> float:
        """What part of computing alone a step takes longer."""
        own = profile_of(method)
        return interval(own).seconds / own.computing_seconds(compute, deviation=deviation) - 1

    derived: list[str] = []
    for family in periodic if total else ():
        if progress is not None:
            progress(f"{family.schedule.name} for this link")
        try:
            setting = families.for_the_link(family, len(shapes), shows)
        except Exception as error:
            failed[f"{family.schedule.name} for this link"] = f"{type(error).__name__}: {error}"
            continue
        if setting is not None:
            found[setting] = profile_of(setting)
            derived.append(setting)

    def warm_up_seconds(method: str) -> float:
        steps, exchange = warm_up_of(parse(method))
        return steps * interval(profile_of(str(exchange))).seconds if steps else 0.0

    dense, dense_seconds = found["dense"], interval(found["dense"]).seconds
    rows: list[Row] = []
    for method, own in found.items():
        low, seconds, high = interval(own)
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
                own.computing_seconds(compute, deviation=deviation),
                warm_up_of(parse(method)).steps,
                warm_up_seconds(method),
                method in derived,
            )
        )
    rows.sort(key=lambda row: row.step_seconds)
    recommended, reasons = recommend(rows, optimizer)
    entries = sum(math.prod(shape) for shape in shapes.values())
    return Plan(
        tuple(rows),
        recommended,
        tuple(reasons),
        entries,
        workers,
        link,
        total,
        failed,
        _finite(cores),
        deviation,
        overheads,
    )


# -- the recommendation ------------------------------------------------------------------------------------


def recommend(rows: Sequence[Row], optimizer: OptimizerKind = "plain SGD") -> tuple[str, list[str]]:
    """The fastest method that has proven itself, or dense if it is hardly slower.

    For an adaptive optimizer methods that were measured with AdamW come first. Of a family of periodic
    averaging only the setting for this link counts, if there is one.
    """
    dense = next(row for row in rows if row.method == "dense")
    able = [row for row in rows if row.kept_back is None and not _replaced(row, rows)]
    if optimizer == "adaptive":
        measured = [row for row in able if loss_behind(row.method) is not None]
        able = measured if any(row.speed_up >= WORTH_IT for row in measured) else able
    best = _best(able, optimizer, lambda row: row.in_a_run)
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
    equal = "all replicas stay equal" if is_exchange(best.method) else "replicas differ between sync rounds"
    reasons = [
        f"a step takes {duration(best.step_seconds)} ({duration(best.low)} to {duration(best.high)}) instead "
        f"of {duration(dense.step_seconds)}: {best.speed_up:.1f} times faster",
        *_wire(best),
        f"it sends {100 * best.sent_bytes / max(1, dense.sent_bytes):.3g} % of dense's bytes "
        f"in {best.rounds:.3g} {'operation' if best.rounds == 1 else 'operations'}",
        f"{equal}; {in_words(best.method, optimizer)}",
        *_warm_up(best, _best(able, optimizer, lambda row: row.step_seconds)),
    ]
    if best.break_even.bandwidth is not None:
        reasons.append(f"it is faster than dense on links below {rate(best.break_even.bandwidth)}")
    return best.method, [*reasons, *_faster(rows, best, optimizer)]


def _faster(rows: Sequence[Row], best: Row, optimizer: OptimizerKind) -> list[str]:
    """What is not recommended: the fastest, and what gains much time for a loss that is known."""
    faster = [row for row in rows if row.step_seconds < best.step_seconds and row.kept_back is not None]
    measured = set(language.useful()) & language.recovered().keys() if optimizer == "adaptive" else set[str]()
    gains = [
        row for row in faster if row.method in measured and WORTH_IT * row.step_seconds <= best.step_seconds
    ]
    nearest = min(gains, key=lambda row: language.behind()[row.method], default=None)
    said = [
        f"{row.method} would be faster, but it is not recommended: {row.kept_back}"
        for row in faster[:1]
        if row is not nearest
    ]
    if nearest is not None:
        said.append(
            f"if a loss that differs from dense's by {language.behind()[nearest.method]:+.3f} will do: "
            f"a step with {nearest.method} takes {duration(nearest.step_seconds)}; it recovers "
            f"{100 * language.recovered()[nearest.method]:.0f} % of the gap between a worker alone and dense"
        )
    return said


def _best(able: Sequence[Row], optimizer: OptimizerKind, seconds: Callable[[Row], float]) -> Row:
    """Of those that are about as fast as the fastest, the most accurate one."""

    def quality(row: Row) -> tuple[bool, float]:
        nats = loss_behind(row.method) if optimizer == "adaptive" else None
        return (nats is not None, proven()[between(row.method)] if nats is None else -nats)

    limit = ABOUT_AS_FAST * min(map(seconds, able))
    return max((row for row in able if seconds(row) <= limit), key=lambda row: (*quality(row), -seconds(row)))


def _replaced(row: Row, rows: Sequence[Row]) -> bool:
    """Whether another setting of the same family was chosen for this link."""
    others = (parse(other.method) for other in rows if other.derived)
    return not row.derived and any(families.same_family(parse(row.method), other) for other in others)


def _wire(best: Row) -> list[str]:
    """How much of the wire is left to see, for a setting that was chosen to hide it."""
    if not best.derived:
        return []
    shows = best.step_seconds / best.computing_seconds - 1
    percent = f"{100 * shows:.2g}" if shows < 1 else f"{100 * shows:.0f}"
    longer = f"a step takes {percent} % longer than computing alone"
    if shows <= families.HIDDEN:
        return [f"the wire is hidden with the shortest period that allows it: {longer}"]
    return [f"the wire shows: {longer}, and no other period that our table supports hides more of it"]


def _warm_up(best: Row, otherwise: Row) -> list[str]:
    """What exact steps cost before a method begins to save: the best one, or the best but for its warm-up."""
    said: list[str] = []
    if best.warmup_steps:
        exchange = warm_up_of(parse(best.method)).exchange
        like = "are like dense's" if isinstance(exchange, Dense) else f"average gradients with {exchange}"
        said.append(f"its first {best.warmup_steps} steps {like} and take {duration(best.warmup_seconds)}")
    if otherwise.method != best.method and otherwise.warmup_seconds > best.warmup_seconds:
        said.append(
            f"{otherwise.method} comes later because of its warm-up: its first "
            f"{otherwise.warmup_steps} steps would take {duration(otherwise.warmup_seconds)} on this link"
        )
    return said


# -- words and numbers -------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    if seconds >= 1000:
        return f"{seconds / 60:.3g} min" if seconds < 36_000 else f"{seconds / 3600:.3g} h"
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
    """Square layers, for a model of which only the size is known: a thousand by a thousand, or smaller ones.

    A model has several layers, which can be synchronised one after the other.
    """
    if parameters < 1:
        raise ConfigError(f"a model has one parameter or more, not {parameters}")
    side = LONGEST_SIDE
    while side > SHORTEST_SIDE and parameters < LEAST_LAYERS * side**2:
        side //= 2
    whole, left = divmod(parameters, side**2)
    shapes: dict[str, tuple[int, ...]] = {f"layer {number}": (side, side) for number in range(whole)}
    if left:
        columns = max(1, math.isqrt(left))
        shapes["last layer"] = (left // columns, columns)
        if left % columns:
            shapes["rest"] = (left % columns,)
    return shapes
