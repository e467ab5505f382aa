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
    speed_up,
    traffic,
    winner,
)


def measure_name(setting: Setting) -> str:
    return f"test {setting.measure}"


def measure_text(value: float, setting: Setting) -> str:
    return units.digits(value) if setting.measure == "perplexity" else units.percent(value)


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


def conclusion(summaries: Sequence[Summary], setting: Setting) -> str:
    """The winner in a sentence, or why there is none."""
    if not summaries:
        return "There are no runs in the records."
    best, base = winner(summaries, setting), summaries[0]
    time = None if best is None else duration(best, setting)
    if best is None or time is None:
        if setting.target is not None:
            return f"No method reached {target_text(setting)} with every seed within {setting.steps:,} steps."
        return "No method ended all its runs about as well as the first one: there is no winner."
    if setting.target is not None:
        said = f"{best.method} was first to {target_text(setting)}, in {units.seconds(time.mean)}"
    else:
        close = f"{100 * AS_GOOD_POINTS:g} point of"
        if setting.measure == "perplexity":
            close = f"{100 * (AS_GOOD_PERPLEXITY - 1):g} % of"
        said = (
            f"{best.method} was the fastest of those that end within {close} {base.method}: "
            f"{units.seconds(time.mean)} for {setting.steps:,} steps"
        )
    if best is base:
        return f"{said}: on this link none of the others is better."
    gain = speed_up(best, base, setting)
    said += (
        f"; {base.method} did not get there"
        if gain is None
        else f", {units.times(gain)} as fast as {base.method}"
    )
    mine, theirs = traffic(best, setting), traffic(base, setting)
    if mine is not None and theirs is not None and 0 < mine.mean < theirs.mean:
        said += f", with {units.part(mine.mean / theirs.mean)} the bytes"
    return said + "."
