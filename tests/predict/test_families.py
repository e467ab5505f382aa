"""Which settings of periodic averaging a table supports, and which of them is taken for a link."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from thinwire import parse
from thinwire.net.costs import Link
from thinwire.predict import families, language
from thinwire.predict import recommend as planning

Table = Callable[[Mapping[str, tuple[float, float]]], None]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """A table that is made up: nats behind dense, and the part of the gap to a worker alone."""

    def made(rows: Mapping[str, tuple[float, float]]) -> None:
        known = {str(parse(text)): values for text, values in rows.items()}
        monkeypatch.setattr(language, "behind", lambda: {text: nats for text, (nats, _) in known.items()})
        monkeypatch.setattr(language, "recovered", lambda: {text: part for text, (_, part) in known.items()})

    return made


def stands(text: str) -> tuple[str, float] | None:
    found = families.standing(parse(text))
    return None if found is None else (found.row, round(found.behind, 6))


def test_a_row_stands_for_settings_that_synchronise_more_often(table: Table) -> None:
    table({"postlocal(every=4, warmup=0)": (0.01, 0.9), "postlocal(every=16, warmup=0)": (0.04, 0.8)})
    far = "postlocal(every=16, warmup=0)"
    assert stands("postlocal(every=7, warmup=0)") == (far, 0.04)
    assert stands("postlocal(every=4, warmup=0)") == ("postlocal(every=4, warmup=0)", 0.01)
    assert stands("postlocal(every=3, warmup=0)") is None, "shorter than any that was measured"
    assert stands("postlocal(every=17, warmup=0)") is None
    assert stands("postlocal(every=7, warmup=400)") is None, "another family"
    assert stands("postlocal(every=7, warmup=0, bits=2)") is None
    assert stands("postlocal(every=7, warmup=0, overlap=2)") is None
    assert stands("topk") is None


@pytest.mark.parametrize("far", [(0.06, 0.9), (0.04, 0.4)])
def test_a_row_that_is_not_recommended_stands_for_nothing(table: Table, far: tuple[float, float]) -> None:
    table({"postlocal(every=4, warmup=0)": (0.01, 0.9), "postlocal(every=16, warmup=0)": far})
    assert stands("postlocal(every=7, warmup=0)") is None
    assert planning.kept_back("postlocal(every=7, warmup=0)", optimizer="adaptive") == "not in our table"


def test_a_setting_with_a_row_of_its_own_is_judged_by_it(table: Table) -> None:
    table({"postlocal(every=4, warmup=0)": (0.2, 0.9), "postlocal(every=16, warmup=0)": (0.04, 0.8)})
    (family,) = families.families()
    found = family.settings(100, spread=False)
    assert found[0] == "postlocal(every=5, warmup=0)"
    assert planning.kept_back("postlocal(every=4, warmup=0)", optimizer="adaptive") is not None


def test_a_row_with_fragments_stands_for_any_number_of_them(table: Table) -> None:
    table(
        {"postlocal(every=16, warmup=0, fragments=16)": (0.04, 0.8), "postlocal(every=4, warmup=0)": (0, 1)}
    )
    for fragments in ("", ", fragments=3", ", fragments=8"):
        assert stands(f"postlocal(every=8, warmup=0{fragments})") is not None
        assert planning.kept_back(f"postlocal(every=8, warmup=0{fragments})", optimizer="adaptive") is None


def test_a_row_without_fragments_needs_two_rows_that_show_what_they_cost(table: Table) -> None:
    rows = {"postlocal(every=16, warmup=400)": (0.03, 0.8), "postlocal(every=4, warmup=0)": (0.01, 0.9)}
    table(rows)
    asked = "postlocal(every=16, warmup=400, fragments=16)"
    assert stands(asked) is None
    cheap = {**rows, "postlocal(every=4, warmup=0, fragments=4)": (0.02, 0.88)}
    table(cheap)
    assert stands(asked) == ("postlocal(every=16, warmup=400)", 0.04), "what fragments cost is added"
    table({**cheap, "postlocal(every=4, warmup=0, fragments=4)": (0.04, 0.88)})
    assert stands(asked) is None, "0.03 + 0.03 is too far behind"
    table({**cheap, "postlocal(every=4, warmup=0, fragments=4)": (0.0, 0.95)})
    assert stands(asked) == ("postlocal(every=16, warmup=400)", 0.03), "a gain is luck"
    table({**rows, "localsgd(every=4)": (0.0, 0.9), "localsgd(every=4, fragments=4)": (0.0, 0.9)})
    assert stands(asked) is None, "another schedule says nothing"


def test_a_fragment_has_a_tensor_or_more(table: Table) -> None:
    table({"postlocal(every=2, warmup=0)": (0, 1), "postlocal(every=5, warmup=0, fragments=5)": (0, 1)})
    (family,) = families.families()
    assert [parse(each).fragments for each in family.settings(3, spread=True)] == [2, 3, 3, 3]
    assert family.settings(1, spread=True) == []
    assert [parse(each).fragments for each in family.settings(3, spread=False)] == [1, 1, 1, 1]


def chosen(wire: float, latency: float = 0.0) -> str | None:
    """Of a made-up link that takes `wire` steps for all bytes, and `latency` steps for any of them."""
    (family,) = families.families()

    def shows(text: str) -> float:
        method = parse(text)
        takes = wire / method.fragments + latency
        return max(0.0, takes - method.delay) * method.fragments / method.period

    return families.for_the_link(family, 64, shows)


SPREAD = {
    "postlocal(every=4, warmup=0, fragments=4)": (0.01, 0.9),
    "postlocal(every=16, warmup=0, fragments=16)": (0.04, 0.8),
}


def test_the_shortest_period_that_hides_the_wire_is_taken(table: Table) -> None:
    table(SPREAD)
    assert chosen(wire=2) == "postlocal(every=4, warmup=0, fragments=4)"
    assert chosen(wire=8) == "postlocal(every=8, warmup=0, fragments=8)"
    assert chosen(wire=16) == "postlocal(every=16, warmup=0, fragments=16)"
    assert chosen(wire=100) == "postlocal(every=16, warmup=0, fragments=16)", "as much as can be hidden"
    assert chosen(wire=0.5, latency=12) == "postlocal(every=16, warmup=0)", "one latency instead of 16"
    assert chosen(wire=0.1) == "postlocal(every=4, warmup=0, fragments=4)"


# -- in a plan -----------------------------------------------------------------------------------------

SHAPES = {f"layer{number}": (256, 256) for number in range(16)}
WORKERS = 2
# Computing takes long and links are slow: what this machine takes to compress hardly counts.
STEP = 20.0


def plan(rate: float, chosen: tuple[str, ...] = ()) -> planning.Plan:
    return planning.make_plan(
        SHAPES,
        WORKERS,
        Link(1e-4, rate),
        STEP,
        (*language.behind(), *chosen),
        optimizer="adaptive",
        periodic=families.families(),
    )


def test_a_plan_has_a_row_for_the_link_and_recommends_it(table: Table) -> None:
    table({"dense": (0.0, 1.0), **SPREAD})
    # A bit for each of a million parameters, in seconds of a step: 131 kB.
    for rate, expected in ((131e3, 4), (131e3 / (7 * STEP), 8), (131e3 / (13 * STEP), 15)):
        made = plan(rate)
        found = parse(made.recommended)
        assert abs(found.period - expected) <= 1
        assert found.fragments == found.period
        row = made.row(made.recommended)
        assert row.derived
        assert row.step_seconds <= (1 + families.HIDDEN) * STEP
        assert any("the wire is hidden" in reason for reason in made.reasons)
        if found.period not in (4, 16):
            assert any("fragments=16), which stands for it, has" in reason for reason in made.reasons)


def test_a_wire_that_cannot_be_hidden_is_said_to_show(table: Table) -> None:
    table({"dense": (0.0, 1.0), **SPREAD})
    made = plan(131e3 / (32 * STEP))
    assert made.recommended == "postlocal(every=16, warmup=0, fragments=16)"
    shown = 100 * (made.row(made.recommended).step_seconds / STEP - 1)
    assert 80 < shown < 130
    digits = ".2g" if shown < 100 else ".0f"
    assert any(f"the wire shows: a step takes {shown:{digits}} % longer" in reason for reason in made.reasons)


def test_a_plan_offers_what_hides_more_of_the_wire_for_a_loss_that_is_known(table: Table) -> None:
    near = "postlocal(every=4, warmup=0, fragments=4)"
    far, useless = (f"postlocal(every={n}, warmup=0, fragments={n})" for n in (16, 32))
    table({"dense": (0.0, 1.0), near: (0.01, 0.9), far: (0.15, 0.7), useless: (0.3, 0.4)})
    made = plan(131e3 / (16 * STEP))
    assert made.recommended == near
    offers = [reason for reason in made.reasons if "will do" in reason]
    assert len(offers) == 1
    assert "+0.150 will do: a step with " + far in offers[0]
    assert "recovers 70 %" in offers[0]
    assert not any("will do" in reason for reason in plan(131e3).reasons), "where the wire is hidden anyway"


def test_nothing_is_derived_without_computing(table: Table) -> None:
    table({"dense": (0.0, 1.0), **SPREAD})
    made = planning.make_plan(
        SHAPES,
        WORKERS,
        Link(1e-4, 1e5),
        0.0,
        optimizer="adaptive",
        chosen=["fp16"],
        periodic=families.families(),
    )
    assert not any(row.derived for row in made.rows)


@pytest.mark.parametrize("quick", ["warmup=0", "warmup=400, warmup_bits=4"])
def test_a_long_warm_up_makes_way_for_a_short_one(table: Table, quick: str) -> None:
    slow, fast = "postlocal(every=16, warmup=400)", f"postlocal(every=16, {quick})"
    table({"dense": (0.0, 1.0), slow: (0.01, 1.0), fast: (0.04, 0.9)})
    made = plan(4e2)
    assert made.recommended == str(parse(fast))
    why = [reason for reason in made.reasons if "because of its warm-up" in reason]
    assert len(why) == 1
    assert why[0].startswith(f"{slow} comes later because of its warm-up: its first 400 steps would take ")
    assert ("its first 400 steps average gradients with qsgd" in " ".join(made.reasons)) == ("bits" in quick)
    # On a faster link the warm-up takes hardly longer than other steps.
    made = plan(1e6)
    assert made.recommended in ("dense", slow)
