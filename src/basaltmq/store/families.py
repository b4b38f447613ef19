"""The column families. No other module names them.

A family is an int (its index in this list) so that hot paths index a list instead of hashing a name. The number is
never written to disk; the label is, and must not change. Opening an older store creates the families added since. A
family on disk that is not listed here means that a newer version wrote the store.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from basaltmq.errors import UnknownFamilyError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """RocksDB settings of a family.

    Blob files keep large values out of compaction. `deletes` enables the collector that compacts an SST file when half
    of a window of its entries are tombstones. Heads of queues have many tombstones.
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
"""Short-lived rows: leases, timers, deduplication."""

BACKLOG = Profile(
    write_buffer_bytes=16 * MIB, block_bytes=16 * 1024, deletes=True, blob_bytes_min=16 * 1024, bloom=False
)
"""Rows that accumulate by the million and are read in order. Large blocks and no bloom filter keep the memory per row
on disk under 1 byte; small blocks with a filter need 5 bytes."""

CONTENT = Profile(write_buffer_bytes=16 * MIB, deletes=True, blob_bytes_min=4 * 1024, bloom=False)
"""Message bodies: blob files with garbage collection at 50 %."""

PLACES = Profile(write_buffer_bytes=16 * MIB, deletes=True, bloom=False)
"""Positions of large bodies in body files: small rows that go with their message."""

INDEX = Profile(write_buffer_bytes=16 * MIB)
"""Derived rows, mostly appended, written without WAL."""


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
    AMQP_1_0_DELIVERIES = ("amqp_1_0_deliveries", CHURN)
    DELETED_OBJECTS = ("deleted_objects",)

    MESSAGES = ("messages", BACKLOG)
    QUEUES = ("queues",)
    STATE = ("state",)
    TRANSIENT = ("transient", BACKLOG)
    MESSAGE_CONTENT = ("message_content", CONTENT)
    CONTENT_REFS = ("content_refs", CHURN)
    QUEUE_STATS = ("queue_stats",)
    LEASES = ("leases", CHURN)
    LEASE_EXPIRY = ("lease_expiry", CHURN)
    DELAYED = ("delayed", CHURN)
    MESSAGE_EXPIRY = ("message_expiry", CHURN)
    TIMERS = ("timers", CHURN)
    DEDUP = ("dedup", CHURN)
    DEDUP_EXPIRY = ("dedup_expiry", CHURN)
    DELETED_QUEUES = ("deleted_queues",)
    XIDS = ("xids",)
    BRANCH_DRAFTS = ("branch_drafts", CONTENT)
    QUARANTINE = ("quarantine",)

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
    POP_LEASES = ("pop_leases", CHURN)
    SCHEDULED_RECORDS = ("scheduled_records", CHURN)

    TOPOLOGY = ("topology",)
    API_KEYS = ("api_keys",)

    MQTT_SESSIONS = ("mqtt_sessions", CHURN)
    MQTT_RETAINED = ("mqtt_retained", BACKLOG)

    BODY_PLACES = ("body_places", PLACES)
    BODY_FILES = ("body_files",)


BODIES: tuple[Family, ...] = (Family.MESSAGES, Family.TRANSIENT, Family.MESSAGE_CONTENT)
"""Families whose size is mostly that of message bodies."""

BY_LABEL: dict[str, Family] = {family.label: family for family in Family}


def family_of(label: str) -> Family:
    """Return the family with this label, as operators name it."""
    try:
        return BY_LABEL[label]
    except KeyError:
        raise UnknownFamilyError(f"unknown family {label!r}; known families: {', '.join(sorted(BY_LABEL))}") from None
