"""Checkpoints that do not fit: an error that names the first difference, and nothing is changed."""

import copy
import io
import math

import pytest
import torch

import thinwire
from tests.laws.cohort import Cohort
from thinwire.core import schema
from thinwire.net.rank_info import RankInfo
from thinwire.sessions import checkpoint

SHAPES: dict[str, tuple[int, ...]] = {"weight": (30, 20), "conv": (8, 4, 3), "bias": (9,)}
METHODS = tuple(str(cls()) for cls in thinwire.list_methods().values())


def trained(method: str, size: int = 2, steps: int = 3, seed: int = 0, dtype=torch.float32) -> Cohort:
    cohort = Cohort(method, size, SHAPES, dtype=dtype, seed=seed)
    for step in range(steps):
        cohort.average(cohort.inputs(step))
    return cohort


def states(cohort: Cohort) -> list[dict]:
    return [session.sealed() for session in cohort.sessions]


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def refused(session: thinwire.Session, state: object, message: str, **options: object) -> None:
    before = session.sealed()
    with pytest.raises(thinwire.StateError, match=message):
        session.load_state_dict(state, **options)
    assert same(before, session.sealed()), "a refused checkpoint changed the session"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_survives_torch_save_with_weights_only(method: str, dtype: torch.dtype) -> None:
    saved = states(trained(method, dtype=dtype))
    fresh = Cohort(method, 2, SHAPES, dtype=dtype)
    for session, state in zip(fresh.sessions, saved, strict=True):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        session.load_state_dict(torch.load(file, weights_only=True))
        assert same(session.sealed(), state)


def test_a_checkpoint_is_a_copy() -> None:
    cohort = trained("topk(ratio=0.1)")
    saved = states(cohort)
    kept = copy.deepcopy(saved)
    cohort.average(cohort.inputs(7))
    assert same(saved[0], kept[0])
    cohort.sessions[0].load_state_dict(saved[0])
    cohort.sessions[1].load_state_dict(saved[1])
    cohort.average(cohort.inputs(7))
    assert same(saved[0], kept[0])


def test_the_first_difference_is_named() -> None:
    session = trained("topk(ratio=0.1)").sessions[0]
    refused(session, states(trained("topk(ratio=0.2)"))[0], "method is .*ratio=0.2.* session's .*ratio=0.1")
    refused(session, states(trained("qsgd"))[0], "method is .*(?i:qsgd)")
    refused(session, states(trained("topk(ratio=0.1)", seed=3))[0], "seed is 3, this session's is 0")
    refused(session, states(trained("topk(ratio=0.1)"))[1], "written by rank 1, this is rank 0")
    for shapes, message in {
        (
            ("weight", (30, 21)),
            ("conv", (8, 4, 3)),
            ("bias", (9,)),
        ): r"number 0 is 'weight' .30, 21. .* there",
        (("weight", (30, 20)), ("convolution", (8, 4, 3)), ("bias", (9,))): "number 1 is 'convolution'",
        (("weight", (30, 20)),): "number 1 is nothing there and 'conv'",
        (*SHAPES.items(), ("more", (3,))): "number 3 is 'more' .* there and nothing here",
    }.items():
        other = Cohort("topk(ratio=0.1)", 2, dict(shapes)).sessions[0]
        refused(session, other.state_dict(), f"another model: parameter {message}")
    other = Cohort("topk(ratio=0.1)", 2, SHAPES, dtype=torch.bfloat16).sessions[0]
    refused(session, other.state_dict(), "'weight' .* bfloat16 there and .* float32 here")


def resealed(state: dict) -> dict:
    """As if it had been written like this."""
    return schema.seal({key: value for key, value in state.items() if key != "checksums"})


def spoil(state: dict, *path: object, value: object = None, drop: bool = False) -> dict:
    spoiled = copy.deepcopy(state)
    place = spoiled
    for key in path[:-1]:
        place = place[key]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return resealed(spoiled) if path[0] != "checksums" else spoiled


def test_malformed_checkpoints_are_refused_and_change_nothing() -> None:
    cohort = trained("powersgd(rank=2)")
    session, state = cohort.sessions[0], states(cohort)[0]
    for key in state:
        refused(session, spoil(state, key, drop=True), f"it has no '{key}'")
    for thing in (None, 3, "state", [None], [state, 4]):
        refused(session, thing, "a state is what state_dict")
    refused(session, [], "no state was given")
    refused(session, {}, "not a thinwire checkpoint")
    refused(session, spoil(state, "format", value=99), "format is 99, this version reads")
    for key, values in {
        "step": (-1, 1.5, "3", True, None),
        "rank": (-1, 2, "0", None),
        "size": (0, -2, 2.0, None),
        "scale": (0.0, -1.0, math.nan, math.inf, "1", None),
    }.items():
        for value in values:
            refused(session, spoil(state, key, value=value), f"{key} is {value!r}.*cannot be")
    for value in (None, 7, "weight", {}):
        refused(session, spoil(state, "parameters", value=value), "parameters is .*, not a list")
    for value in ([], [3, 4, 5], [None], [["weight"]], [["weight", 3, 4]]):
        refused(session, spoil(state, "parameters", value=value), "another model: parameter number 0")
    for value in (None, [], 3):
        refused(session, spoil(state, "state", value=value), "not a mapping")
    error = state["state"]["weight"]["error"]
    for value in (None, 3, error[:-1], error.double(), error.view(2, -1), error.tolist()):
        refused(session, spoil(state, "state", "weight", "error", value=value), "'error' of 'weight' is a")
    refused(session, spoil(state, "state", "weight", value=3), "'weight' that is not a mapping")
    refused(session, spoil(state, "state", 5, value={}), "entry 5 that is not")
    refused(session, spoil(state, "state", "other", value={}), "'other', which this session does not have")
    refused(session, spoil(state, "state", "weight", "more", value=error), "'more' for 'weight', which this")
    refused(session, spoil(state, "state", "weight", drop=True), "lacks 'error' of 'weight'")
    refused(session, spoil(state, "state", "weight", "q", drop=True), "lacks 'q' of 'weight'")
    refused(session, spoil(state, "state", "conv", "error", drop=True), "lacks 'error' of 'conv'")
    session.load_state_dict(state)


# -- another world size --------------------------------------------------------------------------------------


def residuals(method: str) -> dict[str, set[str]]:
    """The fields that belong to a rank, by parameter."""
    session = Cohort(method, 1, SHAPES).sessions[0]
    layouts = session.engine.checkpoint_layouts()
    fields: dict[str, set[str]] = {}
    for name, layout in layouts.items():
        state = session.engine.router.exchange_for(layout.slots[0]).init(layout)
        fields[name] = set(state.tensors("residual") | state.tensors("momentum"))
    return fields


def owed(method: str, all_states: list[dict]) -> dict[tuple[str, str], torch.Tensor]:
    """What the ranks together still owe the mean: the sum of their residuals over their number."""
    total: dict[tuple[str, str], torch.Tensor] = {}
    for state in all_states:
        for name, fields in residuals(method).items():
            for field in fields & state["state"].get(name, {}).keys():
                share = state["state"][name][field].double() / len(all_states)
                total[name, field] = total.get((name, field), torch.zeros_like(share)) + share
    return total


REMEMBERING = tuple(
    method
    for method in (*METHODS, "powersgd(rank=1)")
    if any(tensor.any() for tensor in owed(method, states(trained(method))).values())
)


def test_an_old_rank_is_neither_forgotten_nor_counted_twice() -> None:
    def said(ranks: list[int], keepers: int = 4) -> dict:
        return {"ranks": ranks, "keepers": keepers, "size": 4, "step": 7}

    checkpoint.compare([said([0, 2]), said([1, 3])])
    checkpoint.compare([said([]), said([])])  # "drop" on both
    checkpoint.compare([said([0], 2), said([2], 2), said([], 2)])  # of leaders
    with pytest.raises(thinwire.StateError, match="residuals of old rank 3 would be lost"):
        checkpoint.compare([said([0, 2]), said([1])])
    with pytest.raises(thinwire.StateError, match="residuals of 1 of the 2 old leaders would be lost"):
        checkpoint.compare([said([0], 2), said([], 2)])
    with pytest.raises(thinwire.StateError, match="old rank 0 was given to rank 0 and to rank 1"):
        checkpoint.compare([said([0, 2]), said([0, 1, 3])])


def test_another_world_size_needs_a_choice() -> None:
    saved = states(trained("topk(ratio=0.1)", 3))
    session = trained("topk(ratio=0.1)", 2).sessions[0]
    refused(session, saved[0], "written by 3 ranks and this session has 2.*on_resize='sum'.*on_resize='drop'")
    refused(session, saved, "written by 3 ranks and this session has 2")
    refused(session, saved[0], 'on_resize must be "sum" or "drop"', on_resize="keep")
    refused(session, [saved[0], saved[0]], "state of rank 0 was given twice", on_resize="sum")
    for key, value in (("step", 9), ("scale", 2.0)):
        uneven = [saved[0], spoil(saved[1], key, value=value)]
        refused(session, uneven, f"differ in their {key}", on_resize="sum")


@pytest.mark.parametrize("method", REMEMBERING)
@pytest.mark.parametrize(("old", "new"), [(4, 2), (3, 2), (2, 1), (2, 3), (1, 4)])
def test_sum_conserves_what_is_owed_and_drop_keeps_what_is_shared(method: str, old: int, new: int) -> None:
    saved = states(trained(method, old))
    before, mine = owed(method, saved), residuals(method)
    fresh = Cohort(method, new, SHAPES)
    for rank, session in enumerate(fresh.sessions):
        given = saved[rank::new]
        if given:
            session.load_state_dict(given, on_resize="sum")
        else:
            session.load_state_dict(saved[0], on_resize="drop")
    after = states(fresh)
    for place, tensor in owed(method, after).items():
        assert tensor.shape == before[place].shape
        if not tensor.numel():
            continue  # what this configuration of the method does not remember
        scale = before[place].abs().max()
        assert (tensor - before[place]).abs().max() <= 1e-6 * scale, f"{place}: what is owed changed"
    for session in fresh.sessions:
        session.load_state_dict(saved[0], on_resize="drop")
    for state in states(fresh):
        assert state["step"] == saved[0]["step"]
        for name, kept in state["state"].items():
            for field, tensor in kept.items():
                if field in mine.get(name, ()):
                    assert not tensor.any(), f"{name} still owes something"
                else:
                    assert torch.equal(tensor, saved[0]["state"][name][field]), f"{field} of {name} changed"
    means = fresh.average(fresh.inputs(11))
    assert all(same(means[0], other) for other in means)


# -- the loss scale ------------------------------------------------------------------------------------------


class Scale:
    def __init__(self, value: float) -> None:
        self.value = value

    def get_scale(self) -> float:
        return self.value


def test_residuals_follow_the_scale_through_a_checkpoint_and_replicated_tensors_do_not() -> None:
    """Loaded with another scaler, or none, the same amount is owed."""
    saved = states(trained("powersgd(rank=2)", 1))[0]
    for scale in (None, Scale(1.0), Scale(8.0)):
        session = thinwire.Session(
            [(name, torch.empty(shape)) for name, shape in SHAPES.items()],
            "powersgd(rank=2)",
            rank_info=RankInfo(0, 1),
            dense_below=0,
            scaler=scale,
        )
        session.load_state_dict(spoil(saved, "scale", value=4.0))
        session.engine.begin_step()
        factor = (scale.value if scale else 1.0) / 4.0
        loaded = session.sealed()["state"]["weight"]
        assert torch.equal(loaded["error"], saved["state"]["weight"]["error"] * factor)
        assert torch.equal(loaded["q"], saved["state"]["weight"]["q"])


# -- method strings ------------------------------------------------------------------------------------------


def test_unknown_methods_and_options_name_the_nearest() -> None:
    with pytest.raises(thinwire.ConfigError, match=r"unknown method 'tpok' \(did you mean 'topk'\?\).*dense"):
        thinwire.parse("tpok")
    with pytest.raises(thinwire.ConfigError, match=r"no option 'ration' \(did you mean 'ratio'\?\)"):
        thinwire.parse("topk(ration=0.1)")
    with pytest.raises(thinwire.ConfigError, match="valid options: none"):
        thinwire.parse("dense(bits=3)")
