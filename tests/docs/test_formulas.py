"""The formulas that `thinwire methods` prints are those of the methods."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire import list_methods, list_schedules, parse
from thinwire.averaging import Schedule
from thinwire.core import Layout
from thinwire.methods.families import indices
from thinwire.methods.families.selectors import kept
from thinwire.tools.catalogue.formulas import FORMULAS, REMARKS

# Methods without a formula of their own: what they wrap has one.
WRAPPERS = {"warmup", "route", "periodic"}
OTHERS = (
    "topk(ratio=0.2)",
    "randomblock(ratio=0.03)",
    "qsgd(bits=8, bucket=100)",
    "powersgd(rank=2)",
    "powersgd(rank=50)",
    "laq(bits=8)",
    "localsgd(every=3)",
    "spasgd(groups=7)",
    "pqasgd(every=5, bits=2)",
    "sketched(ratio=0.05, rows=3, cols=400)",
)


def evaluated(text: str, layout: Layout) -> float | None:
    method = parse(text)
    formula = FORMULAS[method.name]
    if formula.startswith("varies: "):
        return None
    (slot,) = layout.slots
    n, rows = slot.numel, slot.shape[0]
    names = {
        **method.options(),
        "n": n,
        "rows": rows,
        "cols": n // rows,
        "itemsize": layout.dtype.itemsize,
        "k": kept(getattr(method, "ratio", 1.0), n),
        "ceil": math.ceil,
        "min": min,
        "index_bytes": indices.code_bytes,
    }
    if method.name == "sketched":
        names |= {"hashes": method.rows, "columns": method.columns(n), "fetched": method.fetched(n)}
    return eval(formula, {"__builtins__": {}}, names)


def payload(text: str, layout: Layout) -> float | None:
    method = parse(text)
    if isinstance(method, Schedule):
        inner = method.inner.payload_bytes(layout, 2)
        return None if inner is None else inner / method.period
    return method.payload_bytes(layout, 2)


@pytest.mark.parametrize("text", [*(name for name in FORMULAS), *OTHERS])
@pytest.mark.parametrize("shape", [(128, 96), (37, 501), (1000, 33)])
def test_a_formula_is_the_method_s_own_count(text: str, shape: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.float16):
        layout = Layout.of([("weight", shape)], dtype)
        assert evaluated(text, layout) == payload(text, layout)


def test_every_method_has_a_formula_and_every_formula_a_method() -> None:
    known = {*list_methods(), *list_schedules()}
    assert set(FORMULAS) == known - WRAPPERS
    assert set(REMARKS) <= known
    assert set(REMARKS) >= WRAPPERS
