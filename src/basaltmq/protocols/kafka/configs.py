"""Settings of topics by Kafka's names.

    retention.ms, retention.bytes    -1: no limit, which is the default here
    cleanup.policy                   delete, compact, or both; with compact alone retention does not apply
    delete.retention.ms, max.message.bytes
    message.timestamp.type           CreateTime, or LogAppendTime for what Kafka's producers send
    basalt.durability                memory, written, synced: what acks=all waits for

Names whose meaning lies in Kafka's own files (segment.bytes, flush.ms ...) are taken and have no effect. Anything else
is refused, so that nobody believes in a setting that does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from basaltmq.broker.auth.permissions import CONFIGURE, READ
from basaltmq.durability import Durability, parse_durability
from basaltmq.errors import BasaltError, InvalidConfigError
from basaltmq.protocols.kafka.context import NODE_ID, Client, Desk
from basaltmq.protocols.kafka.groups import configs as group_configs
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.streams.topics import TopicConfig

TOPIC: Final = 2
BROKER: Final = 4

DYNAMIC_TOPIC: Final = 1
DEFAULT: Final = 5
SET: Final = 0
DELETE: Final = 1

_WITHOUT_EFFECT: Final = frozenset(
    (
        "segment.bytes",
        "segment.ms",
        "segment.jitter.ms",
        "segment.index.bytes",
        "index.interval.bytes",
        "file.delete.delay.ms",
        "flush.ms",
        "flush.messages",
        "preallocate",
        "min.cleanable.dirty.ratio",
        "min.compaction.lag.ms",
        "max.compaction.lag.ms",
        "min.insync.replicas",
        "unclean.leader.election.enable",
    )
)
_FIXED: Final = {"compression.type": "producer"}
"""Settings that can only be what they are."""

LOG_APPEND_TIME: Final = "LogAppendTime"
_TIMES: Final = ("CreateTime", LOG_APPEND_TIME)

_LONG: Final = 5
_INT: Final = 3
_STRING: Final = 2
_LIST: Final = 7


def _limit(name: str, value: str) -> int | None:
    number = _number(name, value)
    return None if number == -1 else number


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InvalidConfigError(f"{name} is a number, not {value!r:.80}") from None


def _times(name: str, value: str) -> bool:
    if value not in _TIMES:
        raise InvalidConfigError(f"{name} is {' or '.join(_TIMES)}, not {value!r:.80}")
    return value == LOG_APPEND_TIME


_DELETE: Final = "delete"
_COMPACT: Final = "compact"


def _policy(name: str, value: str) -> frozenset[str]:
    chosen = frozenset(each.strip() for each in value.split(",") if each.strip())
    if not chosen or chosen - {_DELETE, _COMPACT}:
        raise InvalidConfigError(f"{name} is delete, compact or both, not {value!r:.80}")
    return chosen


def _policy_of(config: TopicConfig) -> str:
    if not config.compact:
        return _DELETE
    return _COMPACT if config.compact_only else f"{_COMPACT},{_DELETE}"


_SETTINGS: Final[dict[str, tuple[str, Callable[[str, str], Any], Callable[[TopicConfig], str], int]]] = {
    "retention.ms": ("retention_ms", _limit, lambda config: _shown(config.retention_ms), _LONG),
    "retention.bytes": ("retention_bytes", _limit, lambda config: _shown(config.retention_bytes), _LONG),
    "cleanup.policy": ("compact", _policy, _policy_of, _LIST),
    "delete.retention.ms": (
        "tombstone_retention_ms",
        _number,
        lambda config: str(config.tombstone_retention_ms),
        _LONG,
    ),
    "max.message.bytes": ("record_bytes_max", _number, lambda config: str(config.record_bytes_max), _INT),
    "message.timestamp.type": (
        "append_time",
        _times,
        lambda config: LOG_APPEND_TIME if config.append_time else "CreateTime",
        _STRING,
    ),
    "basalt.durability": (
        "durability",
        lambda name, value: parse_durability(value),
        lambda config: config.level.value,
        _STRING,
    ),
}


def _shown(limit: int | None) -> str:
    return "-1" if limit is None else str(limit)


def _setting(name: str, value: str | None) -> dict[str, Any]:
    """Fields of the topic's config and their values; none for a setting without effect."""
    if value is None:
        raise InvalidConfigError(f"{name} has no value; leave it out for the default")
    known = _SETTINGS.get(name)
    if known is not None:
        found = known[1](name, value)
        if known[1] is _policy:
            return {"compact": _COMPACT in found, "compact_only": found == {_COMPACT}}
        return {known[0]: found}
    if name in _FIXED and value == _FIXED[name]:
        return {}
    if name in _FIXED:
        raise InvalidConfigError(f"{name} can only be {_FIXED[name]} here, not {value!r:.80}")
    if name in _WITHOUT_EFFECT:
        return {}
    raise InvalidConfigError(f"topics have no setting {name!r:.80} here; they have {', '.join(sorted(_SETTINGS))}")


def topic_config(given: Iterable[tuple[str, str | None]], partitions: int, durability: Durability) -> TopicConfig:
    """The config of a topic made over Kafka. Keys are indexed only where compaction needs them: else batches stay
    closed on their way in."""
    fields: dict[str, Any] = {"durability": durability}
    for name, value in given:
        fields |= _setting(name, value)
    is_compact = fields.get("compact", False)
    return TopicConfig(partitions=partitions, index_keys=is_compact, index_tags=False, **fields)


async def describe_configs(desk: Desk, client: Client, request: Request) -> Fields:
    return {"results": [_described(desk, client, each) for each in request.body["resources"]]}


def _described(desk: Desk, client: Client, asked: Fields) -> Fields:
    answer: Fields = {"resource_type": asked["resource_type"], "resource_name": asked["resource_name"]}
    try:
        if asked["resource_type"] == BROKER and asked["resource_name"] == str(NODE_ID):
            rows = _broker(desk)
        elif asked["resource_type"] == TOPIC:
            client.check(READ, asked["resource_name"])
            rows = _topic(desk.topic(asked["resource_name"]).config)
        elif asked["resource_type"] == group_configs.GROUP:
            rows = group_configs.described(desk, client, asked["resource_name"])
        else:
            message = "only topics, groups and this broker are known"
            return answer | {"error_code": e.INVALID_REQUEST, "error_message": message}
    except (BasaltError, Refused) as error:
        return answer | {"error_code": e.code_of(error), "error_message": str(error)}
    wanted = asked["configuration_keys"]
    return answer | {"configs": [row for row in rows if wanted is None or row["name"] in wanted]}


def _topic(config: TopicConfig) -> list[Fields]:
    usual = TopicConfig()
    rows = []
    for name, (field, _, show, kind) in _SETTINGS.items():
        is_usual = getattr(config, field) == getattr(usual, field)
        rows.append(_row(name, show(config), kind, is_fixed=False, is_usual=is_usual))
    rows += [_row(name, value, _STRING, is_fixed=True) for name, value in _FIXED.items()]
    return rows


def _broker(desk: Desk) -> list[Fields]:
    settings = desk.settings
    return [
        _row("auto.create.topics.enable", str(settings.auto_create).lower(), _STRING, is_fixed=True),
        _row("num.partitions", str(settings.partitions), _INT, is_fixed=True),
        _row("default.replication.factor", "1", _INT, is_fixed=True),
        _row("socket.request.max.bytes", str(settings.request_bytes_max), _INT, is_fixed=True),
        _row("log.retention.ms", "-1", _LONG, is_fixed=True),
    ]


def _row(name: str, value: str, kind: int, *, is_fixed: bool, is_usual: bool = True) -> Fields:
    return {
        "name": name,
        "value": value,
        "read_only": is_fixed,
        "config_source": DEFAULT if is_usual else DYNAMIC_TOPIC,
        "config_type": kind,
    }


async def incremental_alter_configs(desk: Desk, client: Client, request: Request) -> Fields:
    is_trial = request.body["validate_only"]
    return {"responses": [await _altered(desk, client, each, is_trial) for each in request.body["resources"]]}


async def alter_configs(desk: Desk, client: Client, request: Request) -> Fields:
    """All settings at once: what is not named is as it is without being set."""
    is_trial = request.body["validate_only"]
    replaced = []
    for each in request.body["resources"]:
        named = {config["name"] for config in each["configs"]}
        changes = [{**config, "config_operation": SET} for config in each["configs"]]
        known = group_configs.SETTINGS if each["resource_type"] == group_configs.GROUP else _SETTINGS
        changes += [{"name": name, "config_operation": DELETE} for name in known if name not in named]
        replaced.append(await _altered(desk, client, {**each, "configs": changes}, is_trial))
    return {"responses": replaced}


async def _altered(desk: Desk, client: Client, asked: Fields, is_trial: bool) -> Fields:
    name = asked["resource_name"]
    answer: Fields = {"resource_type": asked["resource_type"], "resource_name": name}
    if asked["resource_type"] not in {TOPIC, group_configs.GROUP}:
        message = "only settings of topics and groups can be altered"
        return answer | {"error_code": e.INVALID_REQUEST, "error_message": message}
    try:
        if asked["resource_type"] == group_configs.GROUP:
            await group_configs.alter(desk, client, asked, is_trial)
            return answer
        client.check(CONFIGURE, name)
        topic = desk.topic(name)
        changes: dict[str, Any] = {}
        for each in asked["configs"]:
            if each["config_operation"] == DELETE and each["name"] in _SETTINGS:
                field, _, show, _ = _SETTINGS[each["name"]]
                usual = TopicConfig(durability=desk.settings.durability)
                changes |= _setting(each["name"], show(usual)) | {field: getattr(usual, field)}
            elif each["config_operation"] == SET:
                changes |= _setting(each["name"], each["value"])
            else:
                raise InvalidConfigError(f"{each['name']!r:.80} can be set or deleted, nothing else")
        if is_trial:
            msgspec.structs.replace(topic.config, **changes).check()
        elif changes:
            with desk.guard():
                await asyncio.to_thread(lambda: desk.plane.topics.alter(name, **changes))
    except (BasaltError, Refused) as error:
        return answer | {"error_code": e.code_of(error), "error_message": str(error)}
    return answer
