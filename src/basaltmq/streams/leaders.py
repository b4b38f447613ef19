"""Leader lookup for shards: the extension point for a cluster of several nodes (SPEC B9).

Every write checks the leader first. With one process the leader is always this node. A node that is not the leader
raises `NotLeaderError`, which names the leader. Code that forwards the write keeps the caller's durability level.
"""

from __future__ import annotations

from typing import Final, Protocol

from basaltmq.errors import NotLeaderError

HERE: Final = ""
"""The name of the local node."""


class Leaders(Protocol):
    """Resolves the leader of a shard. Called once per batch, so implementations must answer from memory."""

    def leader_of(self, shard: int) -> str:
        """Return the node that leads the shard, or `HERE` for the local node."""
        ...


class OneNode:
    """A single node, which leads every shard."""

    def leader_of(self, shard: int) -> str:
        return HERE


def require_leader(leaders: Leaders, shard: int) -> None:
    leader = leaders.leader_of(shard)
    if leader != HERE:
        raise NotLeaderError(shard, leader)
