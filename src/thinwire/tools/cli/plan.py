"""`thinwire plan`."""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from thinwire.errors import ConfigError, ThinwireError
from thinwire.tools.cli import collector
from thinwire.tools.cli.compare import Module, own_script
from thinwire.tools.cli.show import AsJson, Methods, console, errors, print_json, progress, table

if TYPE_CHECKING:
    from thinwire.net.costs import Link
    from thinwire.predict.probe import Calibration
    from thinwire.predict.recommend import Plan
    from thinwire.predict.timeline import Compute
    from thinwire.sessions.optimizer_checks import OptimizerKind
    from thinwire.tools.compare.settings import Script

SCRIPT_STEPS = 8
"""The first does not count: it compiles and allocates."""
_MULTIPLES = {"k": 1e3, "m": 1e6, "b": 1e9}


def plan(
    script: Annotated[
        str | None,
        typer.Argument(
            help="Your training script: a few of its steps say what --model and --step-time would.",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="For the script, after --.", show_default=False)
    ] = None,
    module: Module = False,
    model: Annotated[
        str, typer.Option(help="A function that returns your torch.nn.Module, such as mymodel:build.")
    ] = "",
    parameters: Annotated[
        str, typer.Option(help="Instead: the number of parameters, such as 25000000 or 25M.")
    ] = "",
    shapes: Annotated[
        str, typer.Option(help='Instead: all shapes, such as "1024x784,1024,10x1024,10".')
    ] = "",
    workers: Annotated[int, typer.Option(help="The number of workers.")] = 4,
    link: Annotated[str, typer.Option(help="Each worker's link, such as 100mbit,latency=1ms.")] = "100mbit",
    inside: Annotated[
        str, typer.Option(help="The link inside a group of a two-level layout; default: as --link.")
    ] = "",
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Measure the link of your machines: torchrun ... -m thinwire plan --probe"
        ),
    ] = False,
    step_time: Annotated[
        str,
        typer.Option(help="The time of a step on one worker, such as 50ms; 0s compares communication only."),
    ] = "0s",
    deviation: Annotated[
        float,
        typer.Option(min=0.0, help="Of the step times: their standard deviation, as a share of the mean."),
    ] = 0.0,
    cores: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="How many threads of a worker run at full speed beside each other. Default: 1, as computing "
            "takes all cores; on a machine with a GPU there is no limit.",
        ),
    ] = None,
    replicas: Annotated[
        Literal["any", "equal"],
        typer.Option(help="equal: only methods that keep all replicas equal after every step."),
    ] = "any",
    optimizer: Annotated[
        Literal["sgd", "adamw"] | None,
        typer.Option(help="Yours: with AdamW other methods train well. Default: sgd, or the script's own."),
    ] = None,
    methods: Methods = None,
    as_json: AsJson = False,
) -> None:
    """Predict every method's step time on your model and link, and recommend one.

    With your own script: thinwire plan train.py --link 50mbit --workers 8 -- ARGS
    """
    with errors():
        with collector.paused():
            from thinwire.predict import recommend as planning
            from thinwire.predict.families import families
            from thinwire.predict.timeline import USUAL
            from thinwire.tools.compare.settings import split

        own = own_script(script, arguments, module=module)
        if own is not None:
            if model or parameters or shapes or step_time != "0s" or probe or optimizer is not None:
                raise ConfigError(
                    "the script says what the model is and how long a step takes: leave out "
                    "--model, --parameters, --shapes, --step-time, --optimizer and --probe"
                )
            trained = _of_script(own)
        else:
            kind = "adaptive" if optimizer == "adamw" else "plain SGD"
            found = _shapes(model, parameters, shapes)
            said = "" if model or shapes else f"Assumed {planning.described(found)}. --shapes says yours."
            trained = Trained(found, planning.seconds_of(step_time), optimizer=kind, said=said)
        if probe:
            (measured, overheads), workers, rank = _probed()
            if rank != 0:
                return
        else:
            measured, overheads = _given("--link", link), USUAL
        grouped = _given("--inside", inside) if inside else measured
        many = workers >= planning.MANY_WORKERS
        asked = [part for text in methods or () for part in split(text)]
        adapts = not asked and replicas == "any" and trained.optimizer == "adaptive"
        periodic = families() if adapts else []
        asked = asked or planning.candidates(trained.optimizer, replicas=replicas, workers=workers)
        with collector.sparing(), progress(len(asked) + len(periodic) + 1) as advance:
            made = planning.make_plan(
                trained.shapes,
                workers,
                measured,
                trained.compute,
                asked,
                progress=lambda name: advance(name, 1),
                bucket_bytes=trained.bucket_bytes,
                optimizer=trained.optimizer,
                replicas=replicas,
                cores=_cores(cores),
                overheads=overheads,
                inside=grouped if inside or many else None,
                deviation=deviation,
                periodic=periodic,
            )
    if as_json:
        print_json(made.to_json())
    else:
        if trained.said:
            console().print(trained.said, markup=False)
        _show(made)


class Trained(NamedTuple):
    """What is to be trained, and how."""

    shapes: dict[str, tuple[int, ...]]
    compute: Compute | float
    bucket_bytes: int | None = None
    optimizer: OptimizerKind = "plain SGD"
    said: str = ""


def _of_script(own: Script) -> Trained:
    """Take some steps of the script in one worker, without any communication."""
    import tempfile
    from pathlib import Path

    from thinwire.hosts.scripts import ALONE
    from thinwire.predict.recommend import duration
    from thinwire.predict.timeline import Compute
    from thinwire.tools.cli.run import check_script
    from thinwire.tools.script.launch import launch
    from thinwire.tools.script.messages import Ended, Job, Reported

    found: list[Ended] = []

    def note(rank: int, message: Reported) -> None:
        if isinstance(message, Ended):
            found.append(message)

    job = Job(
        script=check_script(own.path, module=own.module),
        module=own.module,
        arguments=own.arguments,
        method=ALONE,
        steps=SCRIPT_STEPS,
        follow=True,
    )
    with tempfile.TemporaryDirectory(prefix="thinwire-") as logs:
        failed = launch(job, 1, note, logs=Path(logs))
    if failed is not None:
        raise ThinwireError(f"the script failed:\n{failed.text}")
    (ended,) = found
    if not ended.models:
        raise ConfigError("the script trained no DistributedDataParallel model: there is nothing to plan for")
    if ended.steps < 2:
        raise ConfigError(f"the script took {ended.steps} optimizer steps: a plan needs two or more to time")
    forward, backward, _ = ended.compute
    first = ended.models[0]
    # Nothing was sent, so all the rest of a step is the script's own work: the optimizer, loading data.
    compute = Compute(forward, backward, max(0.0, ended.step_seconds - forward - backward))
    shapes = {name: shape for one in ended.models for name, shape in one.shapes.items()}
    said = (
        f"{own.path}: {ended.steps} steps of one worker, forward {duration(forward)}, backward "
        f"{duration(backward)}, rest {duration(compute.rest)}; {first.optimizer or 'no optimizer found'}"
    )
    if first.bucket_bytes is not None:
        said += f"; buckets of {first.bucket_bytes / 2**20:g} MiB"
    return Trained(shapes, compute, first.bucket_bytes, first.kind, said)


def _cores(given: float | None) -> float:
    import torch

    return given or (math.inf if torch.cuda.is_available() else 1.0)


def _given(option: str, text: str) -> Link:
    """The slowest of the links that were specified: the group waits for it."""
    from thinwire.net import link as links
    from thinwire.net.costs import Link

    asked = links.parse(text)
    if asked.lab:
        plain = asked.text.removeprefix("lab:")
        raise ConfigError(
            f"{option}: a plan computes and needs no lab: write {plain} instead of {asked.text}"
        )
    slowest = asked.bandwidth
    if slowest is None:
        return links.UNLIMITED
    up = min(each.up_bandwidth for each in asked.all_links)
    down = min(each.down_bandwidth for each in asked.all_links)
    return Link(asked.latency, up, down, max(each.jitter for each in asked.all_links))


def _probed() -> tuple[Calibration, int, int]:
    """The link that torchrun's processes share, their number, and which of them this is."""
    import torch.distributed as dist

    from thinwire.predict.probe import calibrate

    if "RANK" not in os.environ:
        raise ConfigError(
            "--probe measures the link between processes: start it on your machines with "
            "torchrun --nnodes ... -m thinwire plan --probe ..., or give --link"
        )
    dist.init_process_group("gloo")
    try:
        return calibrate(), dist.get_world_size(), dist.get_rank()
    finally:
        dist.destroy_process_group()


def _shapes(model: str, parameters: str, shapes: str) -> dict[str, tuple[int, ...]]:
    from thinwire.predict import recommend as planning

    if model and (parameters or shapes):
        raise ConfigError("give --model, or --parameters and --shapes, not both")
    if model:
        return _of_model(model)
    if not shapes:
        if not parameters:
            raise ConfigError("which model? give --model module:function, --shapes or --parameters")
        return planning.layers_of(_count(parameters))
    found = planning.shapes_of(shapes)
    total = sum(math.prod(shape) for shape in found.values())
    if parameters and _count(parameters) != total:
        raise ConfigError(f"--shapes has {total:,} parameters, --parameters says {_count(parameters):,}")
    return found


def _count(text: str) -> int:
    plain = text.strip().lower().replace(",", "").replace("_", "")
    multiple = _MULTIPLES.get(plain[-1:], 1.0)
    try:
        return round(float(plain.rstrip("kmb")) * multiple)
    except (ValueError, OverflowError):
        raise ConfigError(f"--parameters: {text!r} is not a number such as 25000000 or 25M") from None


def _of_model(text: str) -> dict[str, tuple[int, ...]]:
    import torch

    place, colon, name = text.partition(":")
    if not colon or not place or not name:
        raise ConfigError(f"--model: write module:function, such as mymodel:build, not {text!r}")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(f"--model: {place!r} cannot be imported: {error}") from None
    finally:
        sys.path.pop(0)
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"--model: {place!r} has no function {name!r}")
    with torch.device("meta"):  # only the shapes are needed
        built: object = function()
    if not isinstance(built, torch.nn.Module):
        raise ConfigError(f"--model: {text} returned {type(built).__name__}, not a torch.nn.Module")
    found = {n: tuple(p.shape) for n, p in built.named_parameters() if p.requires_grad}
    if not found:
        raise ConfigError(f"--model: {text} has no parameters to train")
    return found


def _range(low: float, seconds: float, high: float) -> str:
    """From low to high, in the unit of the number in between."""
    size = 1.0 if seconds >= 1 else 1e-3 if seconds >= 1e-3 else 1e-6
    return f"{low / size:.3g}-{high / size:.3g}"


def _show(made: Plan) -> None:
    from thinwire.predict.recommend import duration, rate
    from thinwire.tools import units

    rows: list[tuple[str, ...]] = []
    for row in made.rows:
        pays = row.break_even.verdict
        if row.break_even.bandwidth is not None:
            pays = rate(row.break_even.bandwidth)
        rows.append(
            (
                f"{row.method} *" if row.method == made.recommended else row.method,
                duration(row.step_seconds),
                _range(row.low, row.step_seconds, row.high),
                f"{row.speed_up:.2f} x",
                "-" if row.method == "dense" else pays,
                units.data(row.sent_bytes),
                f"{row.rounds:.3g}",
                duration(row.compression_seconds),
            )
        )
    computation = f"{duration(made.compute)} of computation" if made.compute else "communication only"
    line = "no limit" if math.isinf(made.link.bandwidth) else rate(made.link.bandwidth)
    title = (
        f"{made.parameters:,} parameters, {made.workers:,} workers, {line}, "
        f"latency {duration(made.link.latency)}, {computation}"
    )
    if made.compute and made.cores is not None:
        title += f", {made.cores:g} {'core' if made.cores == 1 else 'cores'} for computing and compression"
    header = ("method", "step", "range", "speed-up", "pays below", "sent", "rounds", "compress")
    table(title, header, rows)
    out = console()
    for method, why in made.failed.items():
        out.print(f"No prediction for {method}: {why}", markup=False)
    kept: dict[str, list[str]] = {}
    for row in made.rows:
        if row.kept_back is not None:
            kept.setdefault(row.kept_back, []).append(row.method)
    if kept:
        out.print("Not recommended, however fast:")
    for why, methods in kept.items():
        out.print(f"  - {why}: {', '.join(methods)}", markup=False)
    out.print(f"Recommended: {made.recommended}", markup=False)
    for reason in made.reasons:
        out.print(f"  - {reason}", markup=False)
    if not made.compute:
        out.print(
            "Without --step-time only the communication is compared: a whole step gains less.", markup=False
        )
