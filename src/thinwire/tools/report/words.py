"""What a comparison came to, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.tools.compare.records import Records, Setting
from thinwire.tools.report import numbers
from thinwire.tools.report.summary import (
    AS_GOOD_PERPLEXITY,
    AS_GOOD_POINTS,
    Summary,
    duration,
    speed_up,
    traffic,
    winner,
)

NONE = "–"
"""What was not measured or not reached."""


def measure_name(setting: Setting) -> str:
    return "test perplexity" if setting.measure == "perplexity" else "test accuracy"


def measure_text(value: float, setting: Setting) -> str:
    return numbers.digits(value) if setting.measure == "perplexity" else numbers.percent(value)


def heading(records: Records) -> str:
    count = len(records.methods)
    bandwidth = records.setting.bandwidth
    where = "without a link limit" if bandwidth is None else f"on a {numbers.rate(bandwidth)} link"
    return f"{count} {'method' if count == 1 else 'methods'} {where}"


def setting_sentence(setting: Setting) -> str:
    if setting.bandwidth is None:
        link = "no limit on the link"
    else:
        speed = f"{numbers.rate(setting.bandwidth)} each, {numbers.seconds(setting.latency)} a message"
        link = f"link {setting.link} ({speed})"
    seeds = "one seed" if setting.seeds == 1 else f"{setting.seeds} seeds"
    return (
        f"{setting.model} with {setting.parameters:,} parameters on {setting.data}; "
        f"{setting.workers} workers, {link}; {setting.batch} examples a worker and step, "
        f"{setting.optimizer} with learning rate {setting.learning_rate:g}; "
        f"{setting.steps:,} steps{'' if setting.target is None else ' at most'}, {seeds}."
    )


def target_text(setting: Setting) -> str:
    assert setting.target is not None
    return measure_text(setting.target, setting).replace(f".0{numbers.SPACE}", numbers.SPACE)


def verdict(summaries: Sequence[Summary], setting: Setting) -> str:
    """The winner in a sentence, or why there is none."""
    best, base = winner(summaries, setting), summaries[0]
    if best is None:
        if setting.target is not None:
            return f"No method reached {target_text(setting)} with every seed within {setting.steps:,} steps."
        return "No method ended all its runs about as well as the first one: there is no winner."
    time = duration(best, setting)
    assert time is not None
    if setting.target is not None:
        said = f"{best.method} was first to {target_text(setting)}, in {numbers.seconds(time.mean)}"
    else:
        close = (
            f"{100 * AS_GOOD_POINTS:g} point of"
            if setting.measure != "perplexity"
            else f"{100 * (AS_GOOD_PERPLEXITY - 1):g} % of"
        )
        said = (
            f"{best.method} was the fastest of those that end within {close} {base.method}: "
            f"{numbers.seconds(time.mean)} for {setting.steps:,} steps"
        )
    if best is base:
        return f"{said}: on this link none of the others is better."
    gain, saved = speed_up(best, base, setting), _bytes_saved(best, base, setting)
    if gain is None:
        said += f"; {base.method} did not get there"
    else:
        said += f", {numbers.times(gain)} as fast as {base.method}"
    if saved is not None and saved > 1:
        said += f", with {numbers.part(1 / saved)} the bytes"
    return said + "."


def _bytes_saved(one: Summary, base: Summary, setting: Setting) -> float | None:
    mine, theirs = traffic(one, setting), traffic(base, setting)
    return None if mine is None or theirs is None or mine.mean <= 0 else theirs.mean / mine.mean


def table_note(setting: Setting) -> str:
    said = "Compute, compress and network are means a step; they overlap, so their sum may exceed the step. "
    if setting.target is not None:
        said += "A run ends where it reaches the target. "
    if setting.seeds > 1:
        said += f"Means over {setting.seeds} seeds, with their range below. "
    return said + f"“{NONE}” is what was not measured or not reached."
