"""Topic and broker configs under their Kafka names: describe and alter.

    retention.ms, retention.bytes    -1 (default): no limit
    cleanup.policy                   delete, compact, or both; with compact alone retention does not apply
    delete.retention.ms, max.message.bytes
    message.timestamp.type           CreateTime, or LogAppendTime for batches from Kafka producers
    basalt.durability                memory, written, synced: what acks=all waits for

Configs that only concern Apache Kafka's own files or replication (segment.bytes, flush.ms ...) are accepted and
ignored. Any other config is rejected, so that no client relies on a config that does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import msgspec

from basaltmq.broker.auth.permissions import CONFIGURE, READ
from basaltmq.broker.turns import in_turns
from basaltmq.durability import Durability, parse_durability
from basaltmq.errors import BasaltError, InvalidConfigError
from basaltmq.protocols.kafka.context import NODE_ID, Client, Context
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
"""Configs with a single valid value."""

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
        raise InvalidConfigError(f"{name} must be a number, not {value!r:.80}") from None


def _timestamp_type(name: str, value: str) -> bool:
    if value not in _TIMES:
        raise InvalidConfigError(f"{name} must be {' or '.join(_TIMES)}, not {value!r:.80}")
    return value == LOG_APPEND_TIME


_DELETE: Final = "delete"
_COMPACT: Final = "compact"


def _policy(name: str, value: str) -> frozenset[str]:
    chosen = frozenset(each.strip() for each in value.split(",") if each.strip())
    if not chosen or chosen - {_DELETE, _COMPACT}:
        raise InvalidConfigError(f"{name} must be delete, compact or both, not {value!r:.80}")
    return chosen


def _policy_of(config: TopicConfig) -> str:
    if not config.compact:
        return _DELETE
    return _COMPACT if config.compact_only else f"{_COMPACT},{_DELETE}"


_SETTINGS: Final[dict[str, tuple[str, Callable[[str, str], Any], Callable[[TopicConfig], str], int]]] = {
    "retention.ms": ("retention_ms", _limit, lambda config: _limit_text(config.retention_ms), _LONG),
    "retention.bytes": ("retention_bytes", _limit, lambda config: _limit_text(config.retention_bytes), _LONG),
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
        _timestamp_type,
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


def _limit_text(limit: int | None) -> str:
    return "-1" if limit is None else str(limit)


def _setting(name: str, value: str | None) -> dict[str, Any]:
    """Return the fields of `TopicConfig` that a config sets; none for a config without effect."""
    if value is None:
        raise InvalidConfigError(f"{name} has no value; omit it to use the default")
    known = _SETTINGS.get(name)
    if known is not None:
        found = known[1](name, value)
        if known[1] is _policy:
            return {"compact": _COMPACT in found, "compact_only": found == {_COMPACT}}
        return {known[0]: found}
    if name in _FIXED and value == _FIXED[name]:
        return {}
    if name in _FIXED:
        raise InvalidConfigError(f"{name} must be {_FIXED[name]}, not {value!r:.80}")
    if name in _WITHOUT_EFFECT:
        return {}
    raise InvalidConfigError(f"unknown topic config {name!r:.80}; valid configs: {', '.join(sorted(_SETTINGS))}")


def topic_config(given: Iterable[tuple[str, str | None]], partitions: int, durability: Durability) -> TopicConfig:
    """Return the config of a topic created over Kafka.

    Keys are indexed only for compaction, because otherwise produced batches need no decoding.
    """
    fields: dict[str, Any] = {"durability": durability}
    for name, value in given:
        fields |= _setting(name, value)
    is_compact = fields.get("compact", False)
    return TopicConfig(partitions=partitions, index_keys=is_compact, index_tags=False, **fields)


async def describe_configs(context: Context, client: Client, request: Request) -> Fields:
    return {"results": await in_turns(request.body["resources"], partial(_described, context, client))}


def _described(context: Context, client: Client, item: Fields) -> Fields:
    response: Fields = {"resource_type": item["resource_type"], "resource_name": item["resource_name"]}
    try:
        if item["resource_type"] == BROKER and item["resource_name"] == str(NODE_ID):
            rows = _broker(context)
        elif item["resource_type"] == TOPIC:
            client.check(READ, item["resource_name"])
            rows = _topic(context.topic(item["resource_name"]).config)
        elif item["resource_type"] == group_configs.GROUP:
            rows = group_configs.described(context, client, item["resource_name"])
        else:
            message = "unsupported resource: only topics, groups and this broker have configs"
            return response | {"error_code": e.INVALID_REQUEST, "error_message": message}
    except (BasaltError, Refused) as error:
        return response | {"error_code": e.code_of(error), "error_message": str(error)}
    wanted = item["configuration_keys"]
    return response | {"configs": [row for row in rows if wanted is None or row["name"] in wanted]}


def _topic(config: TopicConfig) -> list[Fields]:
    defaults = TopicConfig()
    rows = []
    for name, (field, _, show, kind) in _SETTINGS.items():
        is_default = getattr(config, field) == getattr(defaults, field)
        rows.append(_row(name, show(config), kind, is_read_only=False, is_default=is_default))
    rows += [_row(name, value, _STRING, is_read_only=True) for name, value in _FIXED.items()]
    return rows


def _broker(context: Context) -> list[Fields]:
    settings = context.settings
    return [
        _row("auto.create.topics.enable", str(settings.auto_create).lower(), _STRING, is_read_only=True),
        _row("num.partitions", str(settings.partitions), _INT, is_read_only=True),
        _row("default.replication.factor", "1", _INT, is_read_only=True),
        _row("socket.request.max.bytes", str(settings.request_bytes_max), _INT, is_read_only=True),
        _row("log.retention.ms", "-1", _LONG, is_read_only=True),
    ]


def _row(name: str, value: str, kind: int, *, is_read_only: bool, is_default: bool = True) -> Fields:
    return {
        "name": name,
        "value": value,
        "read_only": is_read_only,
        "config_source": DEFAULT if is_default else DYNAMIC_TOPIC,
        "config_type": kind,
    }


async def incremental_alter_configs(context: Context, client: Client, request: Request) -> Fields:
    validate_only = request.body["validate_only"]
    return {"responses": [await _altered(context, client, each, validate_only) for each in request.body["resources"]]}


async def alter_configs(context: Context, client: Client, request: Request) -> Fields:
    """Replace all configs of each resource: a config that the request omits returns to its default."""
    validate_only = request.body["validate_only"]
    replaced = []
    for each in request.body["resources"]:
        named = {config["name"] for config in each["configs"]}
        changes = [{**config, "config_operation": SET} for config in each["configs"]]
        known = group_configs.SETTINGS if each["resource_type"] == group_configs.GROUP else _SETTINGS
        changes += [{"name": name, "config_operation": DELETE} for name in known if name not in named]
        replaced.append(await _altered(context, client, {**each, "configs": changes}, validate_only))
    return {"responses": replaced}


async def _altered(context: Context, client: Client, item: Fields, validate_only: bool) -> Fields:
    name = item["resource_name"]
    response: Fields = {"resource_type": item["resource_type"], "resource_name": name}
    if item["resource_type"] not in {TOPIC, group_configs.GROUP}:
        message = "only configs of topics and groups can be altered"
        return response | {"error_code": e.INVALID_REQUEST, "error_message": message}
    try:
        if item["resource_type"] == group_configs.GROUP:
            await group_configs.alter(context, client, item, validate_only)
            return response
        client.check(CONFIGURE, name)
        topic = context.topic(name)
        changes: dict[str, Any] = {}
        for each in item["configs"]:
            if each["config_operation"] == DELETE and each["name"] in _SETTINGS:
                field, _, show, _ = _SETTINGS[each["name"]]
                defaults = TopicConfig(durability=context.settings.durability)
                changes |= _setting(each["name"], show(defaults)) | {field: getattr(defaults, field)}
            elif each["config_operation"] == SET:
                changes |= _setting(each["name"], each["value"])
            else:
                raise InvalidConfigError(f"unsupported operation on {each['name']!r:.80}; use SET or DELETE")
        if validate_only:
            msgspec.structs.replace(topic.config, **changes).check()
        elif changes:
            with context.guard():
                await asyncio.to_thread(lambda: context.plane.topics.alter(name, **changes))
    except (BasaltError, Refused) as error:
        return response | {"error_code": e.code_of(error), "error_message": str(error)}
    return response
