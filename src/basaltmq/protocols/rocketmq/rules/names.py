"""Names of topics and groups, and their namespaces.

A namespace is a prefix: `shop%orders` is the topic `orders` of the namespace `shop`. Dead letters of a group are in the
topic `%DLQ%group`. Names that begin with `%RETRY%` are reserved: Basalt keeps retries as leases, not in a topic.
"""

from __future__ import annotations

import re
from typing import Final

from basaltmq.protocols.rocketmq.rules.status import Refused
from basaltmq.wire import rocketmq_wire_pb2 as wire

TOPIC_CHARACTERS_MAX: Final = 127
GROUP_CHARACTERS_MAX: Final = 120
"""RocketMQ allows 255 for some clients, 120 for others. `%DLQ%` and the group must be a valid topic name."""

LITE_CHARACTERS_MAX: Final = 64

DEAD_LETTERS: Final = "%DLQ%"
RETRIES: Final = "%RETRY%"
LITE: Final = "%LITE%"
"""`%LITE%topic$lite` is a lite topic of a topic. No name that a client sends has a `$`."""

_NAME: Final = re.compile(r"[%|a-zA-Z0-9._-]+")


def topic_name(resource: wire.Resource) -> str:
    """Return the name of a topic, or raise ILLEGAL_TOPIC."""
    name = _full(resource)
    if not name.strip():
        raise Refused(wire.ILLEGAL_TOPIC, "the topic name must not be blank")
    if len(name) > TOPIC_CHARACTERS_MAX or _NAME.fullmatch(name) is None:
        raise Refused(
            wire.ILLEGAL_TOPIC,
            f"topic {name!r:.200}: a name has at most {TOPIC_CHARACTERS_MAX} characters of a-z, A-Z, 0-9, . _ - % |",
        )
    if name.startswith(RETRIES):
        raise Refused(wire.ILLEGAL_TOPIC, f"topic {name!r}: names that begin with {RETRIES} are reserved")
    return name


def group_name(resource: wire.Resource) -> str:
    """Return the name of a consumer group, or raise ILLEGAL_CONSUMER_GROUP."""
    name = _full(resource)
    if not name.strip():
        raise Refused(wire.ILLEGAL_CONSUMER_GROUP, "the name of the consumer group must not be blank")
    if len(name) > GROUP_CHARACTERS_MAX or _NAME.fullmatch(name) is None:
        raise Refused(
            wire.ILLEGAL_CONSUMER_GROUP,
            f"group {name!r:.200}: a name has at most {GROUP_CHARACTERS_MAX} characters of a-z, A-Z, 0-9, . _ - % |",
        )
    return name


def dead_letter_topic(group: str) -> str:
    return DEAD_LETTERS + group


def check_lite_name(name: str) -> None:
    """Raise ILLEGAL_LITE_TOPIC for a name that no lite topic can have."""
    if len(name) > LITE_CHARACTERS_MAX or _NAME.fullmatch(name) is None:
        raise Refused(
            wire.ILLEGAL_LITE_TOPIC,
            f"lite topic {name!r:.200}: a name has 1 to {LITE_CHARACTERS_MAX} characters of a-z, A-Z, 0-9, . _ - % |",
        )


def lite_topic_of(topic: str, lite: str) -> str:
    """Return the name under which a lite topic is stored."""
    return f"{LITE}{topic}${lite}"


def _full(resource: wire.Resource) -> str:
    return f"{resource.resource_namespace}%{resource.name}" if resource.resource_namespace else resource.name
