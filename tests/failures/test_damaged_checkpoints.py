"""A small, seeded part of `python -m tests.fuzz_checkpoints`."""

from __future__ import annotations

import pytest

from tests import fuzz_checkpoints as fuzz


@pytest.mark.parametrize("method", ["topk(ratio=0.1)", "powersgd(rank=2, start_after=2)", "diloco(every=3)"])
def test_an_undamaged_checkpoint_is_accepted(method: str) -> None:
    fuzz.intact(method)


def test_damaged_checkpoints_are_refused() -> None:
    kinds = {fuzz.trial(seed) for seed in range(150)}
    assert len(kinds - {None}) == 11, f"hardly a kind of damage: {kinds}"
