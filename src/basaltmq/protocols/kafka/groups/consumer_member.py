"""A member of a KIP-848 consumer group: its subscription, and its progress towards the target assignment.

    epoch         epoch of the target it has reached; 0 before the first, STATIC_LEAVE while a static member restarts
    assigned      partitions it may read
    revoking      partitions it must revoke and has not confirmed; until then its epoch stays
    owned         partitions in its last report, which may lag behind the responses

The member owns `assigned` and `revoking`. The two sets are disjoint.
"""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.kafka.groups.assignors import EMPTY, Assignment
from basaltmq.protocols.kafka.wire.schema import Fields

JOINING: Final = 0
STATIC_LEAVE: Final = -2
"""Epoch of a static member that left temporarily. Its place is kept until its session timeout."""

NEVER_MS: Final = 1 << 62


class ConsumerMember:
    """A member of a KIP-848 consumer group."""

    __slots__ = (
        "assigned",
        "assignor",
        "client_id",
        "epoch",
        "host",
        "id",
        "instance",
        "names",
        "owned",
        "pattern",
        "previous_epoch",
        "rack",
        "rebalance_ms",
        "revoke_deadline_ms",
        "revoking",
        "session_ends_at_ms",
    )

    def __init__(self, member_id: str) -> None:
        self.id = member_id
        self.instance: str | None = None
        self.rack: str | None = None
        self.client_id = ""
        self.host = ""
        self.rebalance_ms = 0
        self.names: frozenset[str] = frozenset()
        self.pattern = ""
        self.assignor: str | None = None
        self.epoch = JOINING
        self.previous_epoch = JOINING
        self.assigned: Assignment = EMPTY
        self.revoking: Assignment = EMPTY
        self.owned: Assignment = EMPTY
        """Last reported partitions; heartbeats report them only after a change."""
        self.session_ends_at_ms = NEVER_MS
        """When the session timeout ends without another heartbeat."""
        self.revoke_deadline_ms = NEVER_MS
        """When the member must have revoked its partitions."""

    def update(self, body: Fields) -> bool:
        """Apply the fields of a heartbeat. Return whether the subscription or the assignor changed."""
        before = (self.names, self.pattern, self.assignor)
        if body["instance_id"] is not None:
            self.instance = body["instance_id"]
        if body["rack_id"] is not None:
            self.rack = body["rack_id"]
        if body["rebalance_timeout_ms"] != -1:
            self.rebalance_ms = body["rebalance_timeout_ms"]
        if body["subscribed_topic_names"] is not None:
            self.names = frozenset(body["subscribed_topic_names"])
        if body["subscribed_topic_regex"] is not None:
            self.pattern = body["subscribed_topic_regex"]
        if body["server_assignor"] is not None:
            self.assignor = body["server_assignor"]
        return (self.names, self.pattern, self.assignor) != before

    def reach(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.previous_epoch, self.epoch = self.epoch, epoch

    def has_reached(self, epoch: int, target: Assignment) -> bool:
        return self.epoch == epoch and not self.revoking and self.assigned == target

    @property
    def deadline_ms(self) -> int:
        """When the member is removed: end of its session or of its rebalance timeout."""
        return min(self.session_ends_at_ms, self.revoke_deadline_ms)
