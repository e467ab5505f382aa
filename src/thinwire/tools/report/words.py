"""What a comparison came to, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.tools import units
from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report.summary import (
    AS_GOOD_PERPLEXITY,
    AS_GOOD_POINTS,
    Summary,
    duration,
    traffic,
    winner,
)


def measure_name(setting: Setting) -> str:
    return f"test {setting.measure}" if setting.script is None else setting.measure


def measure_text(value: float, setting: Setting) -> str:
    return value_text(setting.measure, value, setting)


def value_text(name: str, value: float, setting: Setting) -> str:
    return units.percent(value) if setting.is_fraction(name) else units.digits(value)


def heading(records: Records) -> str:
    count = len(records.methods)
    bandwidth = records.setting.bandwidth
    where = "without a link limit" if bandwidth is None else f"on a {units.rate(bandwidth)} link"
    return f"{count} {'method' if count == 1 else 'methods'} {where}"


def target_text(setting: Setting) -> str:
    """The target, without a fraction that is zero; empty without a target."""
    if setting.target is None:
        return ""
    return measure_text(setting.target, setting).replace(f".0{units.SPACE}", units.SPACE)


def as_good_text(setting: Setting) -> str:
    """How close a result must be to be as good."""
    if setting.is_fraction(setting.measure):
        return f"{100 * AS_GOOD_POINTS:g} point"
    return f"{100 * (AS_GOOD_PERPLEXITY - 1):g}{units.SPACE}%"


def worse_text(one: Summary, setting: Setting) -> str:
    """How far the result is clearly worse than the baseline's; empty if it is not."""
    if one.worse is None:
        return ""
    if setting.is_fraction(setting.measure):
        return f"{100 * one.worse:.1f} points worse than {one.baseline}"
    return f"{setting.measure} {units.times(one.worse)} that of {one.baseline}"


def gap_text(one: Summary) -> str:
    """What a method gains from the other workers; empty if it is not known."""
    if one.recovered is None:
        return ""
    part = f"{100 * one.recovered:.0f}{units.SPACE}%"
    return f"recovers {part} of the gap between a worker alone and {one.baseline}"


def conclusion(summaries: Sequence[Summary], setting: Setting) -> str:
    """The winner in a sentence, or why there is none."""
    if not summaries:
        return "There are no runs in the records."
    best, base = winner(summaries, setting), summaries[0] if setting.baseline else None
    time = None if best is None else duration(best, setting)
    if best is None or time is None:
        if setting.target is not None:
            return f"No method reached {target_text(setting)} with every seed within {setting.steps:,} steps."
        other = "the best one" if base is None else base.method
        return f"No method ended all its runs about as well as {other}: there is no winner."
    if setting.target is not None:
        said = f"{best.method} was first to {target_text(setting)}, in {units.seconds(time.mean)}"
    elif not setting.measure:
        said = f"{best.method} was the fastest: {units.seconds(time.mean)} for {setting.steps:,} steps"
    else:
        close = f"within {as_good_text(setting)} of {'the best result' if base is None else base.method}"
        said = (
            f"{best.method} was the fastest of those that end {close}: {units.seconds(time.mean)} for "
            f"{setting.steps:,} steps"
        )
    if base is None:
        return f"{said}."
    if best is base:
        return f"{said}: on this link none of the others is better."
    gain = best.speed_up
    said += (
        f"; {base.method} did not get there"
        if gain is None
        else f", {units.times(gain)} as fast as {base.method}"
    )
    mine, theirs = traffic(best, setting), traffic(base, setting)
    if mine is not None and theirs is not None and 0 < mine.mean < theirs.mean:
        said += f", with {units.part(mine.mean / theirs.mean)} the bytes"
    return said + "."
