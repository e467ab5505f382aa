"""The formulas that `thinwire methods` prints are those of the methods."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.laws.cohort import Cohort
from thinwire import list_methods, list_schedules, parse
from thinwire.averaging import Schedule
from thinwire.core import Exchange, Layout
from thinwire.kernels import Chunks, PerChunk
from thinwire.methods import DeMo, GSpar, Sketched
from thinwire.methods.families import indices
from thinwire.methods.families.sketch import WIRE
from thinwire.methods.families.sparse import count_of
from thinwire.net.costs import Link

KNOWN = {**list_methods(), **list_schedules()}
# Methods without a formula of their own: what they wrap has one.
WRAPPERS = {"warmup", "route", "hierarchical", "delayed", "adam", "ef21", "periodic"}
OTHERS = (
    "topk(ratio=0.2)",
    "topk(ratio=0.03, chunk=200)",
    "sparseloco(every=4, ratio=0.1, bits=4, chunk=64)",
    "diloco(every=7, bits=4)",
    "diloco(every=7, bits=1)",
    "gaussiank(ratio=0.2)",
    "threshold(value=0.5)",
    "randomblock(ratio=0.03)",
    "qsgd(bits=8, bucket=100)",
    "qsgd(bits=2, rotate=True)",
    "demo(ratio=0.1, chunk=20)",
    "gspar(ratio=0.02)",
    "gspar(budget=1.0)",
    "powersgd(rank=2)",
    "powersgd(rank=50)",
    "laq(bits=8)",
    "localsgd(every=3)",
    "spasgd(groups=7)",
    "pqasgd(every=5, bits=2)",
    "sketched(ratio=0.05, rows=3, cols=400)",
    "sketched(ratio=0.02, wire='bf16', candidates=0)",
)
SHAPES = [(128, 96), (37, 501), (1000, 33)]
# Two ranks gather on any link: that is what the formulas are for.
LINK = Link()


def evaluated(text: str, layout: Layout, **counted: Any) -> float:
    """The formula's value; `counted` are the numbers that only the data tell."""
    method = parse(text)
    (slot,) = layout.slots
    n, rows = slot.numel, slot.shape[0]
    names = {
        **method.options(),
        "n": n,
        "rows": rows,
        "cols": n // rows,
        "itemsize": layout.dtype.itemsize,
        "k": count_of(getattr(method, "ratio", 1.0), n),
        "ceil": math.ceil,
        "min": min,
        "index_bytes": indices.code_bytes,
    }
    if isinstance(method, DeMo):
        chunks = Chunks.of(slot.shape, method.chunk)
        k = count_of(method.ratio, chunks.size)
        names |= {"coefficients": chunks.total, "k": k * (chunks.total // chunks.size)}
    elif chunk := getattr(method, "chunk", None):
        names["k"] = PerChunk(count_of(method.options()["ratio"], chunk), chunk).total(n)
    if isinstance(method, Sketched):
        _, columns, fetched = method.sizes(n)
        names |= {"hashes": method.rows, "columns": columns, "fetched": fetched}
        names["width"] = WIRE[method.wire].itemsize
    return eval(method.formula, {"__builtins__": {}}, names | counted)


def payload(text: str, layout: Layout) -> float | None:
    method = parse(text)
    if isinstance(method, Schedule):
        inner = method.inner.payload_bytes(layout, 2, LINK)
        return None if inner is None else inner / method.period
    assert isinstance(method, Exchange)
    return method.payload_bytes(layout, 2, LINK)


def data_decide(text: str) -> bool:
    return payload(text, Layout.of([("weight", SHAPES[0])])) is None


TEXTS = [*sorted(KNOWN.keys() - WRAPPERS), *OTHERS]


@pytest.mark.parametrize("text", [text for text in TEXTS if not data_decide(text)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_formula_is_the_method_s_own_count(text: str, shape: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.float16):
        layout = Layout.of([("weight", shape)], dtype)
        assert evaluated(text, layout) == payload(text, layout)


@pytest.mark.parametrize("text", [text for text in TEXTS if data_decide(text)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_formula_of_what_the_data_decide_is_what_was_metered(text: str, shape: tuple[int, int]) -> None:
    """One worker, whose output shows how many entries were sent."""
    cohort = Cohort(text, 1, {"weight": shape})
    inputs = cohort.inputs(0)
    output = cohort.average(inputs)[0]["weight"]
    sent = int(output.count_nonzero())
    method = parse(text)
    if isinstance(method, GSpar):
        x = inputs[0]["weight"].view(-1)
        certain = x.abs().double() * method.lam(x) >= 1
        counted = sampled_counts(certain, (output.view(-1) != 0) & ~certain)
        assert 0 < counted["sure"] != counted["drawn"] > 0
    else:
        counted = {"k": sent}
        assert 0 < sent < output.numel()
    layout = Layout.of([("weight", shape)])
    assert evaluated(text, layout, **counted) == cohort.driver.meters[0].payload_bytes


def sampled_counts(certain: torch.Tensor, drawn: torch.Tensor) -> dict[str, Any]:
    """The names in GSpar's formula, from where the entries are."""
    where = {int(mask.sum()): mask.nonzero().flatten().tolist() for mask in (certain, drawn)}

    def rice_bytes(k: int, signs: int = 0) -> int:
        low = indices.rice_bits(certain.numel(), k)
        gaps = [b - a - 1 for a, b in pairwise([-1, *where[k]])]
        return math.ceil(k * (low + signs) / 8) + math.ceil(sum((gap >> low) + 1 for gap in gaps) / 8)

    sure, rest = where
    lengths = (sure, rest, rice_bytes(sure))
    head = 4 + sum(math.ceil(length.bit_length() / 7) for length in lengths)
    return {"sure": sure, "drawn": rest, "rice_bytes": rice_bytes, "head": head}


def test_every_method_says_what_it_sends() -> None:
    for name, cls in KNOWN.items():
        assert cls.formula != "-", f"{name} has no formula"
        assert bool(cls.formula) == (name not in WRAPPERS), name
        assert cls.formula or cls.formula_note, name
    assert {text for text in TEXTS if data_decide(text)} >= {"gaussiank", "threshold", "gspar"}


def test_every_method_of_a_paper_names_it() -> None:
    without = {name for name, cls in KNOWN.items() if not cls.reference}
    assert without == {"dense", "fp16", "bf16", "warmup", "route", "hierarchical", "periodic"}
    for name, cls in KNOWN.items():
        assert "Reference:" not in (cls.__doc__ or ""), f"{name}: the reference is a class attribute"
        assert not cls.reference.endswith("."), name
