"""Which rank of a group this is, and which ranks share its host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class RankInfo:
    """A rank and the size of its group."""

    rank: int
    size: int


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group, as one of its ranks sees them. The first rank of each host is its leader.

    - local: the ranks of a full host; one may have fewer
    - members: the ranks of this rank's host
    - leaders: the first rank of every host
    """

    rank_info: RankInfo
    local: int
    members: tuple[int, ...]
    leaders: tuple[int, ...]

    @staticmethod
    def of(rank_info: RankInfo, local: int, ranks: Sequence[int] | None = None) -> Hosts:
        """`ranks` are the numbers of the group's ranks in the world, where `local` consecutive ones share a
        host; None: the group is the world."""
        hosts: dict[int, list[int]] = {}
        for rank, number in enumerate(range(rank_info.size) if ranks is None else ranks):
            hosts.setdefault(number // local, []).append(rank)
        (members,) = (host for host in hosts.values() if rank_info.rank in host)
        return Hosts(rank_info, local, tuple(members), tuple(host[0] for host in hosts.values()))

    @staticmethod
    def given(rank_info: RankInfo, groups: Sequence[tuple[int, ...]]) -> Hosts:
        """`groups[r]` are the ranks that share a host with rank r, itself included, in ascending order."""
        for rank, members in enumerate(groups):
            if rank not in members or any(groups[other] != members for other in members):
                raise ConfigError(
                    f"inner_group of rank {rank} has the ranks {list(members)}, and that of others differs: "
                    "give every rank the one group with the ranks of its host"
                )
        sizes = sorted({len(members) for members in groups})
        if len(sizes) > 1:
            raise ConfigError(
                f"inner_group has {' or '.join(map(str, sizes))} ranks, and every host must have as many as "
                "the others: leave out ranks, or give hierarchical the same local=... on all ranks"
            )
        hosts = sorted(set(groups))
        return Hosts(rank_info, sizes[0], groups[rank_info.rank], tuple(host[0] for host in hosts))

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader of its host."""
        return self.rank_info.rank == self.members[0]

    @property
    def inside(self) -> RankInfo:
        """This rank in its host."""
        return RankInfo(self.members.index(self.rank_info.rank), len(self.members))

    @property
    def between(self) -> RankInfo:
        """This rank's leader among the leaders."""
        return RankInfo(self.leaders.index(self.members[0]), len(self.leaders))
