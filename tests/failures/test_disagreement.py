"""Ranks that were set up differently: every rank raises at attach and says who has what."""

import pytest
import torch

import thinwire
import thinwire.core.engine
from tests.hosts.common import mlp, train, wrap
from thinwire.net.launch import Worker, run_local

A = {"weight": (40, 40), "bias": (40,)}


def parameters(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list:
    return [(name, torch.empty(shape, dtype=dtype)) for name, shape in shapes.items()]


# What is different on rank 1 of three, and what the error must say.
CASES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "method": ({"method": "qsgd"}, ("method", "rank 0, 2: topk(", "rank 1: qsgd(")),
    "configuration": ({"method": "topk(ratio=0.5)"}, ("method", "rank 1: topk(ratio=0.5")),
    "seed": ({"seed": 4}, ("seed", "rank 0, 2: 0; rank 1: 4")),
    "dense_below": ({"dense_below": 7}, ("dense_below", "rank 0, 2: 1024; rank 1: 7")),
    "lanes": ({"lanes": 2}, ("lanes", "rank 0, 2: 1; rank 1: 2")),
    "name": (
        {"shapes": {"wieght": (40, 40), "bias": (40,)}},
        ("number 0", "rank 0, 2: weight of shape (40, 40), float32", "rank 1: wieght of shape"),
    ),
    "order": (
        {"shapes": {"bias": (40,), "weight": (40, 40)}},
        ("number 0", "rank 1: bias of shape"),
    ),
    "shape": (
        {"shapes": {"weight": (40, 40), "bias": (41,)}},
        ("number 1", "rank 1: bias of shape (41,), float32"),
    ),
    "missing parameter": (
        {"shapes": {"weight": (40, 40)}},
        ("number 1", "rank 1: no such parameter"),
    ),
    "dtype": (
        {"dtype": torch.bfloat16},
        ("number 0", "rank 1: weight of shape (40, 40), bfloat16"),
    ),
    "version": (
        {"version": "9.9.9"},
        ("version", f"rank 0, 2: {thinwire.__version__}; rank 1: 9.9.9"),
    ),
}


def disagree(worker: Worker) -> dict[str, str]:
    """Every case in turn: a disagreement leaves the program able to go on."""
    texts = {}
    for name, (different, _) in CASES.items():
        mine = different if worker.rank == 1 else {}
        named = parameters(mine.get("shapes", A), mine.get("dtype", torch.float32))
        options = {key: mine[key] for key in ("seed", "dense_below", "lanes") if key in mine}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thinwire.core.engine, "__version__", mine.get("version", thinwire.__version__))
            with pytest.raises(thinwire.DisagreementError) as caught:
                thinwire.Session(named, mine.get("method", "topk"), **options)
        texts[name] = str(caught.value)
    session = thinwire.Session(parameters(A), "topk")
    session.average({name: torch.ones(shape) for name, shape in A.items()})
    session.detach()
    return texts


def test_every_rank_names_the_ranks_and_what_differs() -> None:
    everybody = run_local(disagree, 3, group_timeout=60)
    for name, (_, expected) in CASES.items():
        texts = {results[name] for results in everybody}
        assert len(texts) == 1, f"{name}: the ranks say different things: {texts}"
        for part in expected:
            assert part in texts.copy().pop(), f"{name}: {part!r} is not in {texts}"


def disagree_under_ddp(worker: Worker) -> list[str]:
    model = wrap(mlp())
    texts = []
    for different in ({"overlap": False}, {"seed": 1}):
        mine = {"method": "topk", **(different if worker.rank == 1 else {})}
        with pytest.raises(thinwire.DisagreementError) as caught:
            thinwire.attach(model, **mine)
        texts.append(str(caught.value))
    train(model, worker.rank, range(3))
    session = thinwire.attach(model, "topk")
    train(model, worker.rank, range(3))
    session.detach()
    return texts


def test_ddp_goes_on_without_thinwire_and_can_be_attached_again() -> None:
    for lanes, seed in run_local(disagree_under_ddp, 2, group_timeout=60):
        assert "lanes: rank 0: 2; rank 1: 1" in lanes
        assert "seed: rank 0: 0; rank 1: 1" in seed


def in_a_subgroup(worker: Worker) -> str | None:
    pair = torch.distributed.new_group([1, 2])
    if worker.rank == 0:
        return None
    with pytest.raises(thinwire.DisagreementError) as caught:
        thinwire.Session(parameters(A), "topk", pair, seed=worker.rank)
    return str(caught.value)


def test_ranks_are_named_by_their_number_in_the_world() -> None:
    _, first, second = run_local(in_a_subgroup, 3, group_timeout=60)
    assert first == second
    assert "seed: rank 1: 1; rank 2: 2" in first
