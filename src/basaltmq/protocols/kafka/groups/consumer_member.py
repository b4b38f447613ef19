"""A member of a consumer group: what it asked for, and how far it is on its way to what it is to have.

    epoch         the target it was brought to; 0 before the first, AWAY while a static member restarts
    assigned      what it was told to read
    revoking      what it was told to let go of, and has not said that it did; no target is reached before
    owned         what it said last that it has, which may be behind what it was told

It holds `assigned` and `revoking`, which have nothing in common.
"""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.kafka.groups.assignors import EMPTY, Share
from basaltmq.protocols.kafka.wire.schema import Fields

JOINING: Final = 0
AWAY: Final = -2
"""A static member that said it comes back: its place is kept until its session is over."""

NEVER_MS: Final = 1 << 62


class ConsumerMember:
    """One member."""

    __slots__ = (
        "assigned",
        "assignor",
        "client_id",
        "epoch",
        "epoch_before",
        "host",
        "id",
        "instance",
        "names",
        "owned",
        "pattern",
        "rack",
        "rebalance_ms",
        "revoke_by_ms",
        "revoking",
        "silent_at_ms",
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
        self.epoch_before = JOINING
        self.assigned: Share = EMPTY
        self.revoking: Share = EMPTY
        self.owned: Share = EMPTY
        """What it said last; it says nothing where that is still so."""
        self.silent_at_ms = NEVER_MS
        """When its session is over if nothing is heard of it."""
        self.revoke_by_ms = NEVER_MS
        """When it is to have let go."""

    def update(self, asked: Fields) -> bool:
        """Take over what a heartbeat says anew; whether its subscription or assignor is another."""
        before = (self.names, self.pattern, self.assignor)
        if asked["instance_id"] is not None:
            self.instance = asked["instance_id"]
        if asked["rack_id"] is not None:
            self.rack = asked["rack_id"]
        if asked["rebalance_timeout_ms"] != -1:
            self.rebalance_ms = asked["rebalance_timeout_ms"]
        if asked["subscribed_topic_names"] is not None:
            self.names = frozenset(asked["subscribed_topic_names"])
        if asked["subscribed_topic_regex"] is not None:
            self.pattern = asked["subscribed_topic_regex"]
        if asked["server_assignor"] is not None:
            self.assignor = asked["server_assignor"]
        return (self.names, self.pattern, self.assignor) != before

    def reach(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch_before, self.epoch = self.epoch, epoch

    def has_reached(self, epoch: int, target: Share) -> bool:
        return self.epoch == epoch and not self.revoking and self.assigned == target

    @property
    def due_ms(self) -> int:
        """When it is no member any more, unless something is heard of it."""
        return min(self.silent_at_ms, self.revoke_by_ms)
