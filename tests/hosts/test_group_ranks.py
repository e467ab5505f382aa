"""The ranks of one replica group compare their settings through the group's store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

import thinwire
from thinwire.hosts.group_ranks import GroupRanks

ALIKE = {"method": "topk(ratio=0.01)", "model": "1234"}


def ranks_of(size: int, seconds: float = 60.0) -> list[GroupRanks]:
    store = HashStore()
    shared = {"_group_world_size": size, "_store": store, "_timeout": timedelta(seconds=seconds)}
    return [GroupRanks(SimpleNamespace(_group_rank=rank, **shared)) for rank in range(size)]


def outcomes(ranks: list[GroupRanks], said: list[dict | None]) -> list[object]:
    def one(rank: GroupRanks, settings: dict | None) -> object:
        rank.say("1/0", settings)
        try:
            return rank.compare("1/0")
        except thinwire.ThinwireError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks, said))


def test_ranks_that_are_alike_go_on_and_clean_up() -> None:
    ranks = ranks_of(2)
    assert outcomes(ranks, [ALIKE, ALIKE]) == [None, None]
    for rank in ranks:
        rank.say("1/1", ALIKE)
    for rank in ranks:
        rank.compare("1/1")
    assert not ranks[0]._store.check([ranks[0]._key("1/0", 0)])
    assert ranks[0]._store.check([ranks[0]._key("1/1", 0)])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ALIKE | {"model": "5678"}, "different models. Begin with the same seed"),
        (ALIKE | {"method": "qsgd(bits=4)"}, r"disagree on method: rank 0: topk.*; rank 1: qsgd\(bits=4\)"),
    ],
)
def test_a_difference_is_an_error_on_all_ranks(other: dict, message: str) -> None:
    for error in outcomes(ranks_of(2), [ALIKE, other]):
        with pytest.raises(thinwire.DisagreementError, match=message):
            raise error


def test_nobody_waits_for_a_rank_that_has_failed() -> None:
    for error in outcomes(ranks_of(3), [ALIKE, None, ALIKE]):
        with pytest.raises(thinwire.PeerError, match="rank 1 of this replica group has failed"):
            raise error


def test_a_silent_rank_is_named_before_the_vote_would_end() -> None:
    first, _ = ranks_of(2, seconds=0.2)
    first.say("1/0", ALIKE)
    with pytest.raises(thinwire.PeerError, match="no word from rank 1"):
        first.compare("1/0")


def test_a_rank_alone_says_nothing() -> None:
    (alone,) = ranks_of(1)
    alone.say("1/0", ALIKE)
    alone.compare("1/0")
    assert alone._store.num_keys() == 0
