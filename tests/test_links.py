"""Links in words, and the throttle that keeps their time."""

from __future__ import annotations

import math

import pytest

from thinwire import ConfigError, Link
from thinwire.links import UNLIMITED, parse


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100mbit", Link(bandwidth=12.5e6)),
        (" 1GBIT ", Link(bandwidth=125e6)),
        ("2.5 kbit", Link(bandwidth=312.5)),
        ("50mbit,latency=10ms,jitter=2ms", Link(0.01, 6.25e6, jitter=0.002)),
        ("latency=500us, 50mbit", Link(0.0005, 6.25e6)),
        ("up=20mbit,down=100mbit", Link(bandwidth=2.5e6, down=12.5e6)),
        ("none", UNLIMITED),
    ],
)
def test_a_link_for_all(text: str, link: Link) -> None:
    links = parse(text)
    assert links.of(3) == (link,) * 3
    assert not links.lab
    assert links.unlimited is (text == "none")


def test_some_ranks_have_links_of_their_own() -> None:
    base, slow, far, free = parse("100mbit,latency=5ms;1:20mbit;2:latency=50ms;3:none").of(4)
    assert base == Link(0.005, 12.5e6)
    assert slow == Link(0.005, 2.5e6)
    assert far == Link(0.05, 12.5e6)
    assert free == UNLIMITED
    assert parse("none;1:20mbit").of(2) == (UNLIMITED, Link(bandwidth=2.5e6))
    assert parse("1gbit;0:latency=1ms").of(1) == (Link(0.001, 125e6),)


def test_the_lab() -> None:
    links = parse("lab:100mbit;1:up=20mbit,down=50mbit")
    assert links.lab
    assert links.of(2) == (Link(bandwidth=12.5e6), Link(bandwidth=2.5e6, down=6.25e6))
    assert parse("lab:none").of(1)[0].bandwidth == math.inf


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fast", "'fast' is not a rate: write bit, kbit, mbit, gbit or tbit behind a number, as in 100mbit"),
        ("", "'' is not a rate"),
        ("100", "'100' is not a rate"),
        ("100mbps", "'100mbps' is not a rate"),
        ("-5mbit", "'-5mbit' is not a rate"),
        ("0mbit", "a rate of 0 never delivers"),
        ("1mbit,latency=10", "'10' is not a time"),
        ("1mbit,lag=10ms", "'lag' is not one of up, down, latency, jitter"),
        ("1mbit,2mbit", "rate is given twice"),
        ("1mbit,up=2mbit,down=2mbit", "give one rate, or up= and down="),
        ("up=2mbit", "up= and down= belong together"),
        ("latency=2ms", "it has no rate"),
        ("1mbit,latency=1ms,jitter=2ms", "jitter is more than latency"),
        ("1mbit;2mbit", "'2mbit' is not a rank and its link, such as 1:20mbit"),
        ("1mbit;1:2mbit;1:3mbit", "rank 1 has two links"),
        ("lab:1mbit,latency=3ms", "the lab limits rates only"),
    ],
)
def test_nonsense_is_one_helpful_line(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"link {text!r}: ")
    assert "\n" not in str(caught.value)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no rank 4 among 4 workers"):
        parse("1mbit;4:2mbit").of(4)
