"""docs/guides/checkpoints.md names the errors that the code raises: each one is provoked, on two ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.averaging.cohort import Cohort as Replicas
from tests.docs.pages import ROOT
from tests.hosts.common import mlp, square_loss
from tests.laws.cohort import Cohort
from thinwire import Checkpointer, Session, errors
from thinwire.core import schema
from thinwire.net.launch import Worker, run_local
from thinwire.sessions import checkpoint_file

PAGE = " ".join((ROOT / "docs/guides/checkpoints.md").read_text().split())
METHOD = "topk(ratio=0.2)"
SHAPES: dict[str, tuple[int, ...]] = {"wide": (24, 37), "vector": (301,)}
Calls = Iterator[Callable[[], object]]


def states(size: int, steps: int) -> list[dict]:
    """What the ranks of an earlier run have saved."""
    cohort = Cohort(METHOD, size, SHAPES)
    for step in range(steps):
        cohort.average(cohort.inputs(step))
    return [session.state_dict() for session in cohort.sessions]


def session_of(method: str = METHOD, shapes: dict[str, tuple[int, ...]] = SHAPES, **options: int) -> Session:
    named = [(name, torch.zeros(shape)) for name, shape in shapes.items()]
    return Session(named, method, dense_below=0, **options)


def run(folder: Path, **options: bool) -> Checkpointer:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Checkpointer(folder, Session(model.named_parameters(), METHOD), model, optimizer, **options)


def unreadable(worker: Worker, folder: Path) -> Calls:
    checkpointer = run(folder)
    checkpointer.save()
    checkpointer.wait()
    dist.barrier()
    for path in folder.rglob(f"rank-{worker.rank}*"):
        path.write_bytes(path.read_bytes()[:-5])
    dist.barrier()
    yield checkpointer.load_latest


def full_disk(worker: Worker, folder: Path) -> Calls:
    def fails(*_: object) -> None:
        raise OSError("no space left on device")

    checkpointer = run(folder, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_file, "write", fails)
        checkpointer.save()
        checkpointer._writing.join()
    yield checkpointer.save


def no_folder(worker: Worker, folder: Path) -> Calls:
    folder.with_suffix(".txt").write_text("not a folder")
    yield lambda: run(folder.with_suffix(".txt") / "inside")


def different_steps(worker: Worker, folder: Path) -> Calls:
    session = session_of()
    session.load_state_dict(states(2, 3 - worker.rank)[worker.rank])
    yield lambda: session.average({name: torch.ones(shape) for name, shape in SHAPES.items()})
    # A schedule notices it in its next sync round.
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = thinwire.attach(model, "localsgd(every=2)", optimizer=optimizer)
    saved = []
    for step in range(3):
        saved.append(copy.deepcopy(replicas.state_dict()))
        square_loss(model, worker.rank, step).backward()
        optimizer.step()
    replicas.load_state_dict(saved[2 * worker.rank])
    yield replicas.sync
    replicas.detach()


def another(worker: Worker, folder: Path) -> Calls:
    own = session_of().state_dict()
    (key,) = own
    for different in (
        session_of("qsgd"),
        session_of(shapes={**SHAPES, "vector": (302,)}),
        session_of(seed=7),
    ):
        yield lambda different=different: different.load_state_dict(own)
    session, whole = session_of(), states(2, 1)[worker.rank]
    sealed = schema.seal
    for damage in ("format", "bit", "field", "residual"):
        (inside,) = copy.deepcopy(whole)[key]["session"]
        parameter = copy.deepcopy(whole)[key]["parameter wide"]
        if damage == "format":
            inside = sealed({**unsealed(inside), "format": 0})
        elif damage == "bit":
            parameter[0]["error"].view(torch.uint8)[3] ^= 1
        elif damage == "field":
            del inside["scale"]
        else:
            parameter[0]["error"][3] = torch.nan
            complete = {**unsealed(inside), "state": {"wide": parameter[0], **rest_of(whole[key])}}
            yield lambda complete=complete: session.load_sealed([sealed(complete)], None)
            continue
        given = {key: {**whole[key], "session": (inside,), "parameter wide": parameter}}
        yield lambda given=given: session.load_state_dict(given)


def unsealed(state: dict) -> dict:
    return {name: value for name, value in state.items() if name != "checksums"}


def rest_of(packed: dict) -> dict:
    return {"vector": packed["parameter vector"][0]}


def on_two_ranks(worker: Worker, folder: Path) -> Calls:
    olds = states(3, 2)
    twice = {**olds[worker.rank], **olds[worker.rank + 1]}
    yield lambda: session_of().load_state_dict(twice, on_resize="sum")
    yield lambda: session_of().load_state_dict(olds[worker.rank], on_resize="sum")
    broken = {**olds[1], **olds[2]} if worker.rank else {"what": 1}
    yield lambda: session_of().load_state_dict(broken, on_resize="sum")


def between_sync_rounds(worker: Worker, folder: Path) -> Calls:
    replicas = Replicas("localsgd(every=3)", 3)
    replicas.train(range(4))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    session = thinwire.attach(model, "localsgd(every=3)", optimizer=optimizer, dense_below=64)
    old = [each.state_dict() for each in replicas.sessions]
    given = old[worker.rank] if worker.rank else {**old[0], **old[2]}
    yield lambda: session.load_state_dict(given, on_resize="sum")
    session.load_state_dict(given, on_resize="drop")
    session.detach()


CASES: dict[str, Callable[[Worker, Path], Calls]] = {
    "If none can be read, `load_latest` raises a `StateError`": unreadable,
    "With `strict=True` the next save raises a `ThinwireError`": full_disk,
    "A folder that cannot be written to at all is a `ConfigError` on every rank": no_folder,
    "the next step, or sync round, raises a `DisagreementError` on every rank": different_steps,
    "A checkpoint of another method, model, seed or version is refused with a `StateError`": another,
    'an old state on two ranks is a `StateError` on all of them, and so is, with "sum",': on_two_ranks,
    '`load_state_dict` raises a `StateError` unless you pass `on_resize="drop"`': between_sync_rounds,
}
# A rank that is gone: tests/failures/test_killed.py, test_elastic.py and test_peers.py.
ELSEWHERE = ("end with a `PeerError`", "After a failure, such as a `PeerError`")


def errors_in(text: str) -> list[str]:
    return [name for name in re.findall(r"`(\w+)`", text) if hasattr(errors, name)]


def provoked(worker: Worker, folder: str) -> dict[str, list[str]]:
    """The class of every error, by the sentence on the page."""
    found: dict[str, list[str]] = {}
    for number, (sentence, case) in enumerate(CASES.items()):
        found[sentence] = []
        for call in case(worker, Path(folder) / str(number)):
            try:
                call()
            except Exception as error:
                found[sentence].append(type(error).__name__)
            else:
                found[sentence].append("nothing")
    return found


def test_every_error_that_the_page_names_is_the_one_that_is_raised(tmp_path: Path) -> None:
    for results in run_local(provoked, 2, str(tmp_path), timeout=400):
        for sentence, raised in results.items():
            assert raised, sentence
            assert raised == errors_in(sentence) * len(raised), sentence


def test_every_error_that_the_page_names_is_provoked_somewhere() -> None:
    for sentence in (*CASES, *ELSEWHERE):
        assert PAGE.count(sentence) == 1, sentence
    assert sorted(errors_in(PAGE)) == sorted(errors_in(" ".join((*CASES, *ELSEWHERE))))
