"""The column families: the only place that names them.

A family is an int (its place in this list) so that hot paths index a list instead of hashing a name. The number is
never written to disk; the label is, and must not change. A family added here appears in older stores when they are
next opened. A family found on disk but not here means the store is newer than this program.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from basaltmq.errors import UnknownFamilyError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """How RocksDB keeps a family.

    Blob files keep large values out of compaction; `deletes` turns on the collector that compacts files in which half
    of a window of entries are tombstones, which is what a queue's head looks like.
    """

    write_buffer_bytes: int = 4 * MIB
    block_bytes: int = 4 * 1024
    compressed: bool = True
    bloom: bool = True
    blob_bytes_min: int | None = None
    deletes: bool = False


RECORDS = Profile()
"""Small rows looked up by key: configuration, versions, offsets."""

CHURN = Profile(write_buffer_bytes=16 * MIB, deletes=True, blob_bytes_min=16 * 1024)
"""Rows that live for a short while: queue entries, leases, messages."""

BACKLOG = Profile(
    write_buffer_bytes=16 * MIB, block_bytes=16 * 1024, deletes=True, blob_bytes_min=16 * 1024, bloom=False
)
"""Rows that wait by the million and are read in their order. Large blocks and no filter: what memory keeps of a row
that is on disk is under a byte, where small blocks and a filter would have it at five."""

CONTENT = Profile(write_buffer_bytes=16 * MIB, deletes=True, blob_bytes_min=4 * 1024, bloom=False)
"""Message bodies: blob files with garbage collection at 50 %."""

INDEX = Profile(write_buffer_bytes=16 * MIB)
"""Append-mostly derived rows, written without WAL."""


class Family(enum.IntEnum):
    """Every column family with its label on disk and its profile."""

    label: str
    profile: Profile

    def __new__(cls, label: str, profile: Profile = RECORDS) -> Family:
        number = len(cls.__members__)
        member = int.__new__(cls, number)
        member._value_ = number
        member.label = label
        member.profile = profile
        return member

    DEFAULT = ("default",)
    VERSION = ("version",)

    CONFIGURED_OBJECTS = ("configured_objects",)
    CONFIGURED_OBJECT_HIERARCHY = ("configured_object_hierarchy",)
    OBJECT_NAMES = ("object_names",)
    PREFERENCES = ("preferences",)
    AMQP_1_0_LINKS = ("amqp_1_0_links",)
    DELETED_OBJECTS = ("deleted_objects",)

    MESSAGE_METADATA = ("message_metadata", CHURN)
    MESSAGE_CONTENT = ("message_content", CONTENT)
    QUEUE_ENTRIES = ("queue_entries", CHURN)
    XIDS = ("xids",)
    QUARANTINE = ("quarantine",)

    MESSAGES = ("messages", BACKLOG)
    LEASES = ("leases", CHURN)
    LEASE_EXPIRY = ("lease_expiry", CHURN)
    QUEUES = ("queues",)
    STATE = ("state",)
    TRANSIENT = ("transient", BACKLOG)
    BODIES = ("bodies", CONTENT)
    CONTENT_REFS = ("content_refs", CHURN)
    QUEUE_STATS = ("queue_stats",)
    LEASE_CALLS = ("lease_calls", CHURN)
    LEASE_CALL_EXPIRY = ("lease_call_expiry", CHURN)
    DELAYED = ("delayed", CHURN)
    MESSAGE_EXPIRY = ("message_expiry", CHURN)
    TIMERS = ("timers", CHURN)
    DEDUP = ("dedup", CHURN)
    DEDUP_EXPIRY = ("dedup_expiry", CHURN)
    DELETED_QUEUES = ("deleted_queues",)
    QUEUE_BRANCHES = ("queue_branches",)
    BRANCH_DRAFTS = ("branch_drafts", CONTENT)
    QUEUE_QUARANTINE = ("queue_quarantine",)

    CONSUMER_OFFSETS = ("consumer_offsets",)
    TOPIC_GROUPS = ("topic_groups",)
    SHARDS = ("shards",)
    STREAM_RECORDS = ("stream_records", CONTENT)
    STREAM_RECORD_INDEX = ("stream_record_index", INDEX)
    STREAM_INDEX = ("stream_index", INDEX)
    IMPORTS = ("imports",)
    PRODUCERS = ("producers",)
    TRANSACTIONS = ("transactions",)
    CONSUMER_GROUPS = ("consumer_groups",)

    TOPOLOGY = ("topology",)
    API_KEYS = ("api_keys",)


BY_LABEL: dict[str, Family] = {family.label: family for family in Family}


def family_of(label: str) -> Family:
    """The family an operator means by its label on disk."""
    try:
        return BY_LABEL[label]
    except KeyError:
        raise UnknownFamilyError(f"there is no family {label!r}; there are {', '.join(sorted(BY_LABEL))}") from None
