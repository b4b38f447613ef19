"""Who leads a shard: the seam for a broker of several nodes (SPEC B9).

Every write asks first. With one process the answer is always "here". A node that is not the leader raises
`NotLeaderError`, which names the leader; whoever forwards the write takes the name from there and keeps the caller's
durability level.
"""

from __future__ import annotations

from typing import Final, Protocol

from basaltmq.errors import NotLeaderError

HERE: Final = ""
"""The name a node has for itself."""


class Leaders(Protocol):
    """Resolves the leader of a shard. Asked once per batch, so it must answer from memory."""

    def leader_of(self, shard: int) -> str:
        """The node that leads the shard, `HERE` if it is this one."""
        ...


class OneNode:
    """The only node leads everything."""

    def leader_of(self, shard: int) -> str:
        return HERE


def require_leader(leaders: Leaders, shard: int) -> None:
    leader = leaders.leader_of(shard)
    if leader != HERE:
        raise NotLeaderError(shard, leader)
