"""A group of ranks in lock-step, for the laws."""

import itertools
from collections.abc import Collection, Iterable, Sequence

import pytest
import torch

from thinwire import Session, list_methods, parse
from thinwire.core import Exchange
from thinwire.drivers import Lockstep
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo

SIZES = (3, 1, 2, 5, 8)
# What is the cheapest operation on one of them is not on another.
LINKS = ("1gbit,latency=50us", "100mbit,latency=1ms", "10mbit,latency=50ms")
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (24, 37),
    "conv": (8, 3, 3, 3),
    "vector": (301,),
    "one": (1,),
    "scalar": (),
}

# Configurations beside each method's default that the laws hold as well. A method need not be listed.
ALSO = (
    "topk(ratio=0.1)",
    "topk(ratio=0.1, reduce='gather')",
    "topk(ratio=0.1, reduce='split')",
    "topk(ratio=0.05, feedback=False)",
    "topk(ratio=0.05, scope='bucket')",
    "topk(ratio=0.05, scope='model')",
    "topk(ratio=0.05, scope='model', reduce='split')",
    "topk(ratio=0.02, warmup=3)",
    "topk(ratio=0.1, chunk=16)",
    "topk(ratio=0.05, chunk=64, values=qsgd(bits=2), reduce='gather')",
    "topk(ratio=0.1, chunk=32, decay=0.9, scope='model')",
    "topk(ratio=0.1, values=qsgd(bits=4))",
    "topk(ratio=0.1, values=qsgd(bits=8, bucket=16), reduce='split')",
    "gaussiank(ratio=0.1)",
    "gaussiank(ratio=0.1, reduce='split', values=qsgd(bits=8))",
    "gaussiank(ratio=0.1, scope='model')",
    "randomk(ratio=0.1, scope='model')",
    "randomk(ratio=0.2, feedback=False)",
    "randomk(ratio=0.2, feedback=False, scale=None)",
    "randomk(ratio=0.1, shared=False)",
    "randomk(ratio=0.1, shared=False, feedback=False, reduce='gather')",
    "randomk(ratio=0.1, shared=False, feedback=False, scale=None)",
    "threshold(value=0.5)",
    "threshold(value=0.5, reduce='split')",
    "threshold(value=0.1, values=qsgd(bits=2), scope='model')",
    "randomblock(ratio=0.2)",
    "randomblock(ratio=0.2, scope='bucket')",
    "randomblock(ratio=0.2, scope='model')",
    "randomblock(ratio=0.3, feedback=False)",
    "randomblock(ratio=0.3, feedback=False, scale=None, scope='model')",
    "qsgd(bits=1, bucket=64)",
    "qsgd(bits=2, bucket=100, norm='l2')",
    "qsgd(bits=8, bucket=33)",
    "qsgd(bits=4, bucket=64, reduce='twoshot')",
    "qsgd(bits=8, bucket=40, reduce='twoshot')",
    "qsgd(bits=2, bucket=64, rotate=True)",
    "qsgd(bits=4, rotate=True, reduce='twoshot')",
    "terngrad(clip=None)",
    "terngrad(clip=2.5, reduce='twoshot')",
    "terngrad(clip=None, reduce='twoshot')",
    "natural(reduce='twoshot')",
    "signsgd(scale='mean')",
    "signsgd(reduce='twoshot')",
    "signsgd(scale=None)",
    "signsgd(scale=None, reduce='twoshot')",
    "signsgd(rotate=True)",
    "signsgd(rotate=True, reduce='twoshot')",
    "efsign(reduce='twoshot')",
    "efsign(bucket=4096)",
    "efsign(bucket=4096, reduce='twoshot')",
    "efsign(bucket=4096, reduce='twoshot', scope='model')",
    "efsign(scope='bucket')",
    "efsign(bits=2)",
    "efsign(bits=3, bucket=4096, reduce='twoshot')",
    "onebit(reduce='twoshot')",
    "gspar(ratio=0.3, rounds=4)",
    "gspar(ratio=0.1, budget=1.0)",
    "gspar(ratio=0.2, scope='model')",
    "gspar(ratio=0.3, reduce='split')",
    "gspar(budget=1.0, reduce='split', scope='model')",
    "gspar(ratio=0.2, reduce='gather')",
    "topk(ratio=0.1, values=natural)",
    "topk(ratio=0.1, values=efsign)",
    "topk(ratio=0.1, values=terngrad)",
    "topk(ratio=0.1, values=onebit, reduce='split')",
    "gaussiank(ratio=0.1, values=onebit)",
    "warmup(steps=1, method=topk(ratio=0.1))",
    "warmup(steps=2, method=powersgd(rank=2))",
    "route(default=topk(ratio=0.1), rules=(('c*', qsgd(bits=8)), ('numel<9', randomblock(ratio=0.5))))",
    "route(default=powersgd(rank=2), rules=(('ndim<=1', fp16), ('conv', topk(scope='model'))))",
    "hierarchical(outer=topk(ratio=0.1), local=2)",
    "hierarchical(outer=topk(ratio=0.1, scope='model', reduce='split'), local=3)",
    "hierarchical(outer=dense, inner=bf16, local=2)",
    "hierarchical(outer=qsgd(bits=4, bucket=64), local=1)",
    "hierarchical(outer=powersgd(rank=2), local=4)",
    "hierarchical(outer=warmup(steps=1, method=dgc(ratio=0.1, momentum=0.0)), local=2)",
    "hierarchical(outer=route(default=efsign, rules=(('conv', lag),)), local=2)",
    "delayed(method=dense)",
    "delayed(method=topk(ratio=0.1, scope='model', reduce='split'))",
    "delayed(method=qsgd(bits=4, bucket=64))",
    "delayed(method=powersgd(rank=2))",
    "delayed(method=dgc(ratio=0.1))",
    "delayed(method=adam(warmup=1))",
    "delayed(method=warmup(steps=2, method=scalecom(ratio=0.1)))",
    "delayed(method=route(default=topk(ratio=0.1), rules=(('c*', qsgd(bits=8)),)))",
    "delayed(method=hierarchical(outer=topk(ratio=0.1), local=2))",
    "delayed(method=topk(ratio=0.1), delay='auto')",
    "heavyball(momentum=0.5, nesterov=True)",
    "dgc(ratio=0.1, momentum=0.0)",
    "dgc(ratio=0.1, momentum=0.0, reduce='split', scope='model')",
    "dgc(ratio=0.1, reduce='gather', nesterov=True, clip=5.0)",
    "dgc(ratio=0.1, reduce='split', values=qsgd(bits=8), warmup=2)",
    "dgc(ratio=0.05, scope='model', clip=2.0)",
    "demo(ratio=0.1, beta=1.0, sign=False)",
    "demo(ratio=0.1, beta=1.0, sign=False, reduce='split', chunk=10)",
    "demo(ratio=0.1, beta=1.0, sign=False, values=qsgd(bits=4))",
    "demo(ratio=0.05, beta=0.9, reduce='gather', chunk=16, warmup=2)",
    "scalecom(ratio=0.1)",
    "scalecom(ratio=0.1, beta=0.3)",
    "scalecom(ratio=0.05, scope='model')",
    "scalecom(chunk=20)",
    "scalecom(chunk=30, beta=0.5, scope='bucket')",
    "sketched(ratio=0.05, rows=3, cols=100, momentum=0.0)",
    "sketched(ratio=0.05, rows=3, cols=100, momentum=0.0, scope='tensor')",
    "sketched(ratio=0.02, cols=80, k=20, candidates=2)",
    "sketched(ratio=0.5)",
    "sketched(ratio=0.05, rows=3, cols=100, momentum=0.0, wire='bf16')",
    "sketched(ratio=0.05, rows=3, cols=100, candidates=0, wire='fp16')",
    "a2sgd(average_every=4, scope='tensor')",
    "a2sgd(average_every=None, allow_drift=True)",
    "lag(rule='ps', window=3, xi=1.0)",
    "lag(window=1, xi=40.0)",
    "laq(bits=1, window=2, xi=20.0, max_skip=2)",
    "laq(bits=32, xi=0.5, max_skip=1)",
    "slaq(bits=2, allowance=100.0)",
    "lasg(window=4, bits=8)",
    "adam(warmup=1)",
    "adam(exchange=efsign, warmup=2, refresh=None)",
    "adam(exchange=dense, warmup=2, beta1=0.5)",
    "adam(exchange=topk(ratio=0.1, chunk=64, values=qsgd(bits=4)), warmup=1)",
    "adam(exchange=topk(ratio=0.1, scope='model'), warmup=1, refresh=3)",
    "adam(exchange=powersgd(rank=2), warmup=1)",
    "adam(exchange=route(default=qsgd(bits=8), rules=(('ndim<=1', fp16),)), warmup=1)",
    "ef21(exchange=topk(ratio=0.1), momentum=0.0)",
    "ef21(exchange=topk(ratio=0.1, scope='bucket', reduce='split'))",
    "ef21(exchange=efsign(reduce='twoshot'), momentum=0.5)",
    "ef21(exchange=powersgd(rank=1))",
    "powersgd(rank=1)",
    "powersgd(rank=2, warm_start=False)",
    "powersgd(rank=2, feedback=False)",
    "powersgd(rank=2, start_after=2)",
    "powersgd(rank=2, alternate=True)",
    "powersgd(rank=1, alternate=True, start_after=1, feedback=False)",
    "powersgd(rank=1, alternate=True, warm_start=False)",
)

DEFAULTS: tuple[str, ...] = tuple(str(cls()) for cls in list_methods().values())
CONFIGURATIONS = DEFAULTS + ALSO
# Every way to reduce and every code of values once; the convergence of the others is a slow test.
CONVERGENCE = {
    *DEFAULTS,
    "topk(ratio=0.1, reduce='split')",
    "topk(ratio=0.1, values=qsgd(bits=4))",
    "gaussiank(ratio=0.1, reduce='split', values=qsgd(bits=8))",
    "dgc(ratio=0.1, momentum=0.0)",
    "demo(ratio=0.1, beta=1.0, sign=False)",
    "sketched(ratio=0.05, rows=3, cols=100, momentum=0.0)",
    "qsgd(bits=4, bucket=64, reduce='twoshot')",
    "efsign(reduce='twoshot')",
    "gspar(ratio=0.3, reduce='split')",
    "powersgd(rank=1, alternate=True, warm_start=False)",
}
SLOW_CONVERGENCE = (set(ALSO) - CONVERGENCE) | {str(parse(name)) for name in ("warmup", "route")}


def named(predicate) -> list[str]:
    """The configurations whose traits satisfy the predicate."""
    return [text for text in CONFIGURATIONS if predicate(parse(text).traits)]


def second_of_a_kind(methods: Iterable[str]) -> dict[str, None]:
    """Those, in order, that use the operations of a group as one before them does."""
    fields = ("reduce", "scope", "rule", "wire", "alternate", "local", "rotate")
    seen, found = set(), {}
    for text in methods:
        exchange = parse(text)
        inner = getattr(exchange, "exchange", None) or getattr(exchange, "outer", None)
        kind = exchange.name, type(inner), *(getattr(exchange, field, None) for field in fields)
        if kind in seen:
            found[text] = None
        seen.add(kind)
    return found


def is_late(method: str) -> bool:
    """Whether a step gets the mean of the step before it."""
    return getattr(parse(method), "delay", 0) == 1


LATE = [method for method in CONFIGURATIONS if is_late(method)]
PROMPT = [method for method in CONFIGURATIONS if not is_late(method)]


def every(
    methods: Iterable[str] = CONFIGURATIONS,
    *,
    quick: Collection[str] = DEFAULTS,
    slow: Collection[str] = (),
    **ranges: Sequence[object],
):
    """Quick methods with all combinations of the ranges, and marked `quick` with the first.

    Others with the first and one more: neighbours of the list, which are of one family, with different ones.
    The rest of their combinations is for the slow run.
    """
    cases, combinations = [], list(itertools.product(*ranges.values()))
    for turn, method in enumerate(methods):
        further = 1 + turn % (len(combinations) - 1) if len(combinations) > 1 else 0
        for place, values in enumerate(combinations):
            marks = [pytest.mark.quick] if place == 0 and method in quick else []
            if method in slow or (method not in quick and place not in (0, further)):
                marks.append(pytest.mark.slow)
            cases.append(pytest.param(method, *values, marks=marks))
    return pytest.mark.parametrize(("method", *ranges), cases)


class Cohort:
    """`size` sessions in one process, driven in lock-step."""

    def __init__(
        self,
        method: str | Exchange,
        size: int,
        shapes: dict[str, tuple[int, ...]] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        dense_below: int = 0,
        seed: int = 0,
        driver: Lockstep | None = None,
        link: Link | None = None,
    ) -> None:
        self.shapes = SHAPES if shapes is None else shapes
        self.dtype = dtype
        self.driver = driver or Lockstep(size)
        parameters = [(name, torch.zeros(shape, dtype=dtype)) for name, shape in self.shapes.items()]
        self.sessions = [
            Session(
                parameters,
                method,
                rank_info=RankInfo(rank, size),
                dense_below=dense_below,
                seed=seed,
                link=link,
            )
            for rank in range(size)
        ]

    def inputs(self, seed: int, scale: float = 1.0) -> list[dict[str, torch.Tensor]]:
        """Different gradients for every rank, with a heavy tail."""
        rng = torch.Generator().manual_seed(seed)
        return [
            {
                name: (torch.randn(shape, generator=rng) ** 3 * scale).to(self.dtype)
                for name, shape in self.shapes.items()
            }
            for _ in self.sessions
        ]

    def average(
        self, inputs: list[dict[str, torch.Tensor]], *, in_place: bool = False
    ) -> list[dict[str, torch.Tensor]]:
        results, programs = [], []
        for session, tensors in zip(self.sessions, inputs, strict=True):
            session.engine.begin_step()
            result, views = session.engine.views(tensors, in_place=in_place)
            results.append(result)
            programs.append(session.engine.program(views))
        committed = self.driver.run(programs)
        for session in self.sessions:
            session.engine.end_step(committed)
        return results

    def residuals(self) -> dict[str, torch.Tensor]:
        """What all ranks together have not sent yet, by parameter, in float64."""
        found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes.items()}
        for session in self.sessions:
            for name, amount in session.residuals().items():
                found[name] += amount.double().view(found[name].shape)
        return found


def total(inputs: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: sum(one[name].double() for one in inputs) for name in inputs[0]}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool((a.view(-1).view(torch.uint8) == b.view(-1).view(torch.uint8)).all())
    )


def memory(session: Session) -> dict[str, object]:
    """All that a session saves, except for its counters, which hold times."""
    return {field: value for field, value in session.snapshot().items() if field != "counters"}


def same_state(a: object, b: object) -> bool:
    """Equal to the last bit, through nested containers."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same_state(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b
