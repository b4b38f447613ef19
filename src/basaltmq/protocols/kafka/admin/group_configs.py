"""Configs of KIP-848 consumer groups under their Kafka names.

    consumer.session.timeout.ms       session timeout, default 45 s
    consumer.heartbeat.interval.ms    heartbeat interval, default 5 s

The valid ranges are wider than Apache Kafka's broker defaults (45 to 60 s, 5 to 15 s). A group need not exist to have
configs, and deleting the group keeps them. A change applies from each member's next heartbeat.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from basaltmq.broker.auth.acls import Operation, Resource
from basaltmq.broker.auth.permissions import CONFIGURE, READ
from basaltmq.errors import InvalidArgumentError, InvalidConfigError
from basaltmq.protocols.kafka.admin.topic_settings import INT
from basaltmq.protocols.kafka.context import Client, Context
from basaltmq.protocols.kafka.groups.classic_requests import NAME_BYTES_MAX
from basaltmq.protocols.kafka.groups.consumer_group_table import timing
from basaltmq.protocols.kafka.groups.row import NOT_SET, GroupRow
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields

GROUP: Final = 32
"""Resource type of groups."""

DYNAMIC_GROUP: Final = 8
DEFAULT: Final = 5
SET: Final = 0
DELETE: Final = 1


class Setting(NamedTuple):
    field: str
    """Field of `GroupRow` and of `Timing`."""
    least: int
    most: int


SETTINGS: Final = {
    "consumer.session.timeout.ms": Setting("session_ms", 1_000, 1_800_000),
    "consumer.heartbeat.interval.ms": Setting("heartbeat_ms", 100, 60_000),
}


def described(context: Context, client: Client, name: str) -> list[Fields]:
    """Return all configs of a group."""
    _check(client, READ, name)
    with context.guard():
        row = context.consumer_groups.row(name) or GroupRow()
    return [
        {
            "name": label,
            "value": str(getattr(timing(row), setting.field)),
            "read_only": False,
            "config_source": DEFAULT if getattr(row, setting.field) == NOT_SET else DYNAMIC_GROUP,
            "config_type": INT,
        }
        for label, setting in SETTINGS.items()
    ]


async def alter(context: Context, client: Client, item: Fields, validate_only: bool) -> None:
    """Set or delete configs; all changes apply or none. Durable on return."""
    name = item["resource_name"]
    _check(client, CONFIGURE, name)
    with context.guard():
        row = context.consumer_groups.row(name) or GroupRow()
        for each in item["configs"]:
            row = _changed(row, each)
        times = timing(row)
        if times.heartbeat_ms >= times.session_ms:
            raise InvalidConfigError(
                f"heartbeat interval {times.heartbeat_ms} ms must be below session timeout {times.session_ms} ms"
            )
        if not validate_only:
            context.consumer_groups.set(name, row)
            await context.plane.watermarks.group.durable()


def _check(client: Client, kind: str, name: str) -> None:
    if not name or len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidArgumentError(f"a group name must have 1 to {NAME_BYTES_MAX} bytes")
    operation = Operation.DESCRIBE_CONFIGS if kind == READ else Operation.ALTER_CONFIGS
    if not client.may(kind, name, operation, Resource.GROUP):
        raise Refused(e.GROUP_AUTHORIZATION_FAILED, f"{kind} access to group {name!r} refused")


def _changed(row: GroupRow, item: Fields) -> GroupRow:
    label = item["name"]
    setting = SETTINGS.get(label)
    if setting is None:
        raise InvalidConfigError(f"unknown group config {label!r:.80}; valid configs: {', '.join(SETTINGS)}")
    if item["config_operation"] == DELETE:
        return row._replace(**{setting.field: NOT_SET})
    if item["config_operation"] != SET:
        raise InvalidConfigError(f"unsupported operation on {label}; use SET or DELETE")
    try:
        value = int(item["value"] or "")
    except ValueError:
        raise InvalidConfigError(f"{label} must be a number, not {item['value']!r:.80}") from None
    if not setting.least <= value <= setting.most:
        raise InvalidConfigError(f"{label} must be {setting.least} to {setting.most}, not {value}")
    return row._replace(**{setting.field: value})
