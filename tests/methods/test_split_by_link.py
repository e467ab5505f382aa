"""Gather or split is decided by the link of the session, the same on all ranks."""

import torch

from tests.laws.cohort import same_state
from thinwire import Session
from thinwire.drivers import Lockstep
from thinwire.net.costs import Link
from thinwire.net.rank_info import RankInfo

SIZE = 4
SHAPE = (100, 100)


def operations(link: Link | None) -> dict[str, int]:
    """Of one step of top-k with a small tensor beside it."""
    driver = Lockstep(SIZE)
    parameters = [("weight", torch.zeros(SHAPE)), ("bias", torch.zeros(5))]
    sessions = [
        Session(parameters, "topk(ratio=0.1)", rank_info=RankInfo(rank, SIZE), link=link)
        for rank in range(SIZE)
    ]
    for session in sessions:
        session.engine.confirms = False
    for step in range(2):
        programs, results = [], []
        for session in sessions:
            rng = torch.Generator().manual_seed(10 * step + session.rank_info.rank)
            given = {name: torch.randn(t.shape, generator=rng) for name, t in parameters}
            session.engine.begin_step()
            result, views = session.engine.views(given)
            results.append(result)
            programs.append(session.engine.program(views))
        committed = driver.run(programs)
        for session in sessions:
            session.engine.end_step(committed)
        assert all(same_state(results[0], other) for other in results)
    return {name: tally.operations // 2 for name, tally in driver.meters[0].by_operation.items()}


def test_rounds_count_on_a_link_with_latency_and_bytes_on_a_slow_one() -> None:
    assert operations(Link(latency=0.02, bandwidth=125e6)) == {"all_gather": 1}
    assert operations(Link(latency=50e-6, bandwidth=12.5e6)) == {"all_to_all": 2, "all_gather": 1}


def test_a_split_with_small_tensors_takes_three_operations() -> None:
    """The lengths, the pieces, and a gather in which the means of small tensors ride."""
    found = operations(Link(latency=50e-6, bandwidth=12.5e6))
    assert sum(found.values()) == 3
