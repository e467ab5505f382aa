"""Link strings: "100mbit", "50mbit,latency=10ms", "up=20mbit,down=100mbit", "lab:100mbit".

    specification = ["lab:"] link {";" rank ":" link}
    link          = "none" | item {"," item}
    item          = rate | "up=" rate | "down=" rate | "latency=" time | "jitter=" time

A rate is a number and kbit, mbit or gbit (powers of ten, per second); a time is a number and us, ms or s. The
items after a rank replace the same items for that rank only: in "100mbit,latency=5ms;1:20mbit" rank 1 has
20 Mbit and the same latency as the others. "lab:" asks for real interfaces in network namespaces instead of
a throttle (see `thinwire.tools.lab`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Protocol

from thinwire.errors import ConfigError
from thinwire.net.costs import Link

UNLIMITED = Link(latency=0.0, bandwidth=math.inf)
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z/]*)")


@dataclass(frozen=True)
class Links:
    """A parsed link string: a link for every rank, and whether real interfaces are wanted."""

    link: Link
    overrides: tuple[tuple[int, Link], ...] = ()
    lab: bool = False
    text: str = ""

    @property
    def unlimited(self) -> bool:
        return not self.overrides and self.link == UNLIMITED

    @property
    def bandwidth(self) -> float | None:
        """That of the slowest rank in its slower direction, in bytes per second; None for no limit."""
        slowest = min(min(link.up_bandwidth, link.down_bandwidth) for link in self.all_links)
        return None if math.isinf(slowest) else slowest

    @property
    def latency(self) -> float:
        """The largest latency of any rank."""
        return max(link.latency for link in self.all_links)

    @property
    def all_links(self) -> tuple[Link, ...]:
        return (self.link, *(link for _, link in self.overrides))

    def of(self, size: int) -> tuple[Link, ...]:
        """The links of `size` ranks."""
        links = [self.link] * size
        for rank, link in self.overrides:
            if rank >= size:
                raise ConfigError(f"link {self.text!r}: there is no rank {rank} among {size} workers")
            links[rank] = link
        return tuple(links)

    def __str__(self) -> str:
        return self.text


def parse(text: str | Links) -> Links:
    """Read a link specification."""
    if isinstance(text, Links):
        return text
    body = text.strip().lower()
    lab = body.startswith("lab:")
    first, *others = (clause.strip() for clause in body.removeprefix("lab:").split(";"))
    base = _link(first, None, text)
    overrides: dict[int, Link] = {}
    for clause in others:
        rank, colon, own = clause.partition(":")
        if not colon or not rank.strip().isdecimal():
            raise _mistake(text, f"{clause!r} is not a rank and its link, such as 1:20mbit")
        if int(rank) in overrides:
            raise _mistake(text, f"rank {int(rank)} has two links")
        overrides[int(rank)] = _link(own.strip(), base, text)
    links = Links(base, tuple(sorted(overrides.items())), lab, body)
    if lab:
        _check_for_lab(links)
    return links


def slowest_link(links: str | Link) -> Link:
    """A link, or the slowest of a specification."""
    if isinstance(links, Link):
        return links
    every = parse(links).all_links
    up, down = min(link.up_bandwidth for link in every), min(link.down_bandwidth for link in every)
    return Link(max(link.latency for link in every), up, None if up == down else down)


def _check_for_lab(links: Links) -> None:
    for link in links.all_links:
        if link != UNLIMITED and (link.latency, link.jitter) != (Link().latency, 0.0):
            raise _mistake(links.text, "the lab limits rates only: leave out latency and jitter, or 'lab:'")


def _link(clause: str, base: Link | None, text: str) -> Link:
    if clause == "none":
        return UNLIMITED
    found: dict[str, float] = {}
    for item in clause.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            name, value = "rate", name
        if name in found:
            raise _mistake(text, f"{name} is given twice")
        if name in ("rate", "up", "down"):
            found[name] = _quantity(value, _RATES, "rate", "100mbit", text) / 8
        elif name in ("latency", "jitter"):
            found[name] = _quantity(value, _TIMES, "time", "10ms", text)
        else:
            raise _mistake(text, f"{name!r} is not one of up, down, latency, jitter")
    return _apply(found, base, text)


def _apply(found: dict[str, float], given: Link | None, text: str) -> Link:
    base = Link(bandwidth=math.inf) if given is None or given == UNLIMITED else given
    if "rate" in found and ("up" in found or "down" in found):
        raise _mistake(text, "give one rate, or up= and down=")
    if ("up" in found) != ("down" in found):
        raise _mistake(text, "up= and down= belong together")
    link = replace(base, latency=found.get("latency", base.latency), jitter=found.get("jitter", base.jitter))
    if "rate" in found:
        link = replace(link, bandwidth=found["rate"], down=None)
    elif "up" in found:
        link = replace(link, bandwidth=found["up"], down=found["down"])
    elif given is None:
        raise _mistake(text, "it has no rate: begin with one, such as 100mbit")
    if link.jitter > link.latency:
        raise _mistake(text, "jitter is more than latency: a message would arrive before it was sent")
    return link


def _quantity(value: str, units: dict[str, float], kind: str, example: str, text: str) -> float:
    match = _QUANTITY.fullmatch(value)
    if match is None or match[2] not in units:
        raise _mistake(
            text, f"{value!r} is not a {kind}: write {_listed(units)} behind a number, as in {example}"
        )
    amount = float(match[1]) * units[match[2]]
    if kind == "rate" and amount == 0.0:
        raise _mistake(text, "a rate of 0 never delivers; 'none' is a link without limits")
    return amount


def _listed(units: dict[str, float]) -> str:
    *most, last = units
    return f"{', '.join(most)} or {last}"


def _mistake(text: str, what: str) -> ConfigError:
    return ConfigError(f"link {text.strip()!r}: {what}")


class Throttled(Protocol):
    """A session, as far as it is used here."""

    def throttle(self, links: str | Links, *, seed: int = 0) -> None: ...


def throttle(session: Throttled, links: str | Links, *, seed: int = 0) -> None:
    """Let the session's operations take as long as on this link; `Session.throttle` has the details.

    A link of the lab is slow by itself and is not throttled.
    """
    asked = parse(links)
    if not asked.lab:
        session.throttle(asked, seed=seed)
