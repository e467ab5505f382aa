"""A session with a secret: a rank without it, or with another one, is refused on every rank."""

import json
import os

import pytest
import torch

import thinwire
from thinwire.net import frames
from thinwire.net.handshake import LONGEST, agree
from thinwire.net.launch import Worker, run_local

GOOD, OTHER = "correct horse battery", "another horse battery"
CASES = {
    "none": ((None, None, None), None),
    "same": ((GOOD, GOOD, GOOD), None),
    "missing": ((GOOD, None, GOOD), ("rank 1 has no secret",) * 3),
    "only one": ((None, None, GOOD), ("rank 0, 1 has no secret",) * 3),
    "different": (
        (GOOD, GOOD, OTHER),
        (
            "the secret differs: rank 2 could not prove",
            "the secret differs: rank 2 could not prove",
            "the secret differs: rank 0, 1 could not prove",
        ),
    ),
}


def attached(worker: Worker, cases: dict) -> dict[str, str | None]:
    """All cases one after the other: a refused session leaves nothing behind."""
    found: dict[str, str | None] = {}
    for name, (secrets, _) in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("THINWIRE_SECRET", raising=False)
            if secrets[worker.rank] is not None:
                patch.setenv("THINWIRE_SECRET", secrets[worker.rank])
            try:
                thinwire.Session([("weight", torch.zeros(40, 40))], "qsgd").detach()
            except thinwire.DisagreementError as error:
                found[name] = str(error)
            else:
                found[name] = None
    return found


def test_ranks_prove_that_they_know_the_secret() -> None:
    results = run_local(attached, 3, CASES, group_timeout=60)
    for name, (secrets, expected) in CASES.items():
        for rank, found in enumerate(results):
            if expected is None:
                assert found[name] is None
            else:
                assert expected[rank] in (found[name] or ""), (name, rank)
                assert all(secret is None or secret not in found[name] for secret in secrets)


def in_a_pair(worker: Worker) -> str | None:
    torch.distributed.barrier()  # or rank 0 may leave while the others still connect to it
    pair = torch.distributed.new_group([1, 2])
    if worker.rank == 0:
        return None
    os.environ["THINWIRE_SECRET"] = GOOD if worker.rank == 1 else OTHER
    with pytest.raises(thinwire.DisagreementError) as caught:
        thinwire.Session([("weight", torch.zeros(40, 40))], "qsgd", pair)
    return str(caught.value)


def test_ranks_are_named_by_their_number_in_the_world() -> None:
    _, first, second = run_local(in_a_pair, 3, group_timeout=60)
    assert "rank 2 could not prove to know the secret of rank 1" in first
    assert "rank 1 could not prove to know the secret of rank 2" in second


# -- descriptions that cannot be ---------------------------------------------------------------------------


def answer_of(text: bytes, announced: int | None = None):
    """An `execute` for two ranks, of which the second one says this."""

    def execute(op: frames.Primitive) -> object:
        assert isinstance(op, frames.AllGather)
        if op.block.numel() == 8 and op.payload_bytes == 0 and not execute.lengths:  # type: ignore[attr-defined]
            execute.lengths = True  # type: ignore[attr-defined]
            theirs = torch.tensor([len(text) if announced is None else announced])
            return torch.stack([op.block, theirs.view(torch.uint8)])
        row = torch.zeros_like(op.block)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: row.numel()]
        return torch.stack([op.block, row])

    execute.lengths = False  # type: ignore[attr-defined]
    return execute


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\x00",
        b"[]",
        b"7",
        b'"text"',
        b"[" * 100_000,
        b'{"parameters": 3}',
        b'{"parameters": [1]}',
        b'{"parameters": [["a", 1, "float32"]]}',
        b'{"parameters": {"a": 1}}',
    ],
)
def test_a_description_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(thinwire.DisagreementError, match="rank 5 does not describe a thinwire session"):
        agree({"method": "qsgd", "parameters": []}, answer_of(text), [4, 5])


@pytest.mark.parametrize("announced", [0, -1, LONGEST + 1, 2**62])
def test_a_description_of_an_impossible_length_is_refused(announced: int) -> None:
    with pytest.raises(
        thinwire.DisagreementError, match=f"rank 5 announces a description of {announced} bytes"
    ):
        agree({"method": "qsgd"}, answer_of(b"{}", announced), [4, 5])


def test_another_kind_of_session_is_named() -> None:
    text = json.dumps({"method": "topk", "parameters": [], "secret": False}).encode()
    with pytest.raises(thinwire.DisagreementError, match="disagree on method: rank 4: qsgd; rank 5: topk"):
        agree({"method": "qsgd", "parameters": []}, answer_of(text), [4, 5])
