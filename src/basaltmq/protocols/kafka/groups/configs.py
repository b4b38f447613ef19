"""Settings of consumer groups of the second protocol, by Kafka's names; members cannot bring their own.

    consumer.session.timeout.ms       how long a member may be silent: 45 s unless set
    consumer.heartbeat.interval.ms    how often it is asked to speak: every 5 s unless set

Apache Kafka's own bounds (45 to 60 s, 5 to 15 s) are a broker's settings there; here they are wider. A group need not
be there to be given settings, and deleting it does not take them. They apply from each member's next heartbeat on.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from basaltmq.broker.auth.permissions import CONFIGURE, READ
from basaltmq.errors import InvalidArgumentError, InvalidConfigError
from basaltmq.protocols.kafka.context import Client, Desk
from basaltmq.protocols.kafka.groups.classic_groups import NAME_BYTES_MAX
from basaltmq.protocols.kafka.groups.consumer_groups import timing
from basaltmq.protocols.kafka.groups.row import NOT_SET, GroupRow
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields

GROUP: Final = 32
"""The kind of resource."""

DYNAMIC_GROUP: Final = 8
DEFAULT: Final = 5
SET: Final = 0
DELETE: Final = 1
_INT: Final = 3


class Setting(NamedTuple):
    field: str
    """Of the row, and of the timing."""
    least: int
    most: int


SETTINGS: Final = {
    "consumer.session.timeout.ms": Setting("session_ms", 1_000, 1_800_000),
    "consumer.heartbeat.interval.ms": Setting("heartbeat_ms", 100, 60_000),
}


def described(desk: Desk, client: Client, name: str) -> list[Fields]:
    """All settings of a group."""
    _check(client, READ, name)
    with desk.guard():
        row = desk.consumer_groups.row(name) or GroupRow()
    return [
        {
            "name": label,
            "value": str(getattr(timing(row), setting.field)),
            "read_only": False,
            "config_source": DEFAULT if getattr(row, setting.field) == NOT_SET else DYNAMIC_GROUP,
            "config_type": _INT,
        }
        for label, setting in SETTINGS.items()
    ]


async def alter(desk: Desk, client: Client, asked: Fields, is_trial: bool) -> None:
    """Set or unset some, all or none of them. Durable on return."""
    name = asked["resource_name"]
    _check(client, CONFIGURE, name)
    with desk.guard():
        row = desk.consumer_groups.row(name) or GroupRow()
        for each in asked["configs"]:
            row = _changed(row, each)
        held = timing(row)
        if held.heartbeat_ms >= held.session_ms:
            raise InvalidConfigError(
                f"members that speak every {held.heartbeat_ms} ms cannot be silent for {held.session_ms} ms at most"
            )
        if not is_trial:
            desk.consumer_groups.set(name, row)
            await desk.plane.watermarks.group.durable()


def _check(client: Client, kind: str, name: str) -> None:
    if not name or len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidArgumentError(f"a group's name has 1 to {NAME_BYTES_MAX} bytes")
    if not client.may(kind, name):
        raise Refused(e.GROUP_AUTHORIZATION_FAILED, f"{kind} access to group {name!r} refused")


def _changed(row: GroupRow, asked: Fields) -> GroupRow:
    label = asked["name"]
    setting = SETTINGS.get(label)
    if setting is None:
        raise InvalidConfigError(f"groups have no setting {label!r:.80} here; they have {', '.join(SETTINGS)}")
    if asked["config_operation"] == DELETE:
        return row._replace(**{setting.field: NOT_SET})
    if asked["config_operation"] != SET:
        raise InvalidConfigError(f"{label} can be set or deleted, nothing else")
    try:
        value = int(asked["value"] or "")
    except ValueError:
        raise InvalidConfigError(f"{label} is a number, not {asked['value']!r:.80}") from None
    if not setting.least <= value <= setting.most:
        raise InvalidConfigError(f"{label} is {setting.least} to {setting.most}, not {value}")
    return row._replace(**{setting.field: value})
