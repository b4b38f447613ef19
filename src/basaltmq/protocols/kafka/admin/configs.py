"""Configs of topics, groups and the broker: describe and alter.

`topic_settings.py` has the table of topic settings, `group_configs.py` that of groups. Configs of the broker are
read-only; the settings file of the broker changes them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from basaltmq.broker.auth.acls import Operation
from basaltmq.broker.auth.permissions import CONFIGURE, READ
from basaltmq.broker.scheduling.turns import in_turns
from basaltmq.durability import Durability
from basaltmq.errors import BasaltError, InvalidConfigError
from basaltmq.protocols.kafka.admin import group_configs
from basaltmq.protocols.kafka.admin.group_configs import DEFAULT, DELETE, SET
from basaltmq.protocols.kafka.admin.topic_settings import (
    BOOLEAN,
    INT,
    LIST,
    SETTINGS,
    STRING,
    Setting,
    changed,
    default_of,
    items_of,
    value_of,
)
from basaltmq.protocols.kafka.context import NODE_ID, Client, Context
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.streams.topics import TopicConfig

TOPIC: Final = 2
BROKER: Final = 4

DYNAMIC_TOPIC: Final = 1
STATIC_BROKER: Final = 4
"""Sources of a value, besides DEFAULT."""

APPEND: Final = 2
SUBTRACT: Final = 3
"""Operations of IncrementalAlterConfigs, besides SET and DELETE."""


async def describe_configs(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    described = partial(_described, context, client, body["include_synonyms"], body["include_documentation"])
    return {"results": await in_turns(body["resources"], described)}


def _described(context: Context, client: Client, has_synonyms: bool, has_documentation: bool, item: Fields) -> Fields:
    kind, name = item["resource_type"], item["resource_name"]
    response: Fields = {"resource_type": kind, "resource_name": name}
    try:
        if kind == BROKER and name in {str(NODE_ID), ""}:
            # The empty name asks for defaults of all brokers that were set while they run. There are none.
            rows = _broker(context, client) if name else []
        elif kind == TOPIC:
            client.check(READ, name, Operation.DESCRIBE_CONFIGS)
            rows = topic_rows(context.topic(name).config, context.settings.topic_durability)
        elif kind == group_configs.GROUP:
            rows = group_configs.described(context, client, name)
        else:
            message = "unsupported resource: only topics, groups and this broker have configs"
            return response | {"error_code": e.INVALID_REQUEST, "error_message": message}
    except (BasaltError, Refused) as error:
        return response | {"error_code": e.code_of(error), "error_message": str(error)}
    wanted = item["configuration_keys"]
    rows = [row for row in rows if wanted is None or row["name"] in wanted]
    for row in rows:
        if not has_synonyms:
            row.pop("synonyms", None)
        if not has_documentation:
            row.pop("documentation", None)
    return response | {"configs": rows}


def topic_rows(config: TopicConfig, durability: Durability) -> list[Fields]:
    """Return all settings of a topic. `durability` is the listener's default."""
    return [
        _topic_row(name, setting, value_of(config, name), default_of(name, durability))
        for name, setting in SETTINGS.items()
    ]


def _topic_row(name: str, setting: Setting, value: str, default: str) -> Fields:
    synonyms = []
    if value != default:
        synonyms.append({"name": name, "value": value, "source": DYNAMIC_TOPIC})
    if setting.broker_name:
        synonyms.append({"name": setting.broker_name, "value": default, "source": DEFAULT})
    return {
        "name": name,
        "value": value,
        "read_only": False,
        "config_source": DEFAULT if value == default else DYNAMIC_TOPIC,
        "config_type": setting.type,
        "synonyms": synonyms,
        "documentation": setting.documentation,
    }


def _broker(context: Context, client: Client) -> list[Fields]:
    settings = context.settings
    host, port = client.address()
    address = f"PLAINTEXT://{host}:{port}"
    rows = [
        _broker_row("advertised.listeners", address, STRING),
        _broker_row("auto.create.topics.enable", str(settings.auto_create).lower(), BOOLEAN),
        _broker_row("broker.id", str(NODE_ID), INT),
        _broker_row("default.replication.factor", "1", INT),
        _broker_row("delete.topic.enable", "true", BOOLEAN),
        _broker_row("group.coordinator.rebalance.protocols", "classic,consumer", LIST),
        _broker_row("max.connections", str(settings.connections_max), INT),
        _broker_row("node.id", str(NODE_ID), INT),
        _broker_row("num.partitions", str(settings.partitions), INT),
        _broker_row("process.roles", "broker,controller", LIST),
        _broker_row("socket.request.max.bytes", f"{settings.request_bytes_max:d}", INT),
    ]
    rows += [
        _broker_row(setting.broker_name, default_of(name, settings.topic_durability), setting.type)
        for name, setting in SETTINGS.items()
        if setting.broker_name
    ]
    return rows


def _broker_row(name: str, value: str, kind: int) -> Fields:
    return {
        "name": name,
        "value": value,
        "read_only": True,
        "config_source": STATIC_BROKER,
        "config_type": kind,
        "synonyms": [{"name": name, "value": value, "source": STATIC_BROKER}],
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
        known = group_configs.SETTINGS if each["resource_type"] == group_configs.GROUP else SETTINGS
        changes += [{"name": name, "config_operation": DELETE} for name in known if name not in named]
        replaced.append(await _altered(context, client, {**each, "configs": changes}, validate_only))
    return {"responses": replaced}


async def _altered(context: Context, client: Client, item: Fields, validate_only: bool) -> Fields:
    name = item["resource_name"]
    response: Fields = {"resource_type": item["resource_type"], "resource_name": name}
    if item["resource_type"] not in {TOPIC, group_configs.GROUP}:
        message = "only configs of topics and groups can be altered; the settings file has those of the broker"
        return response | {"error_code": e.INVALID_REQUEST, "error_message": message}
    try:
        if item["resource_type"] == group_configs.GROUP:
            await group_configs.alter(context, client, item, validate_only)
            return response
        client.check(CONFIGURE, name, Operation.ALTER_CONFIGS)
        before = config = context.topic(name).config
        for each in item["configs"]:
            config = _with(config, each, context.settings.topic_durability)
        config.check()
        changes = {
            field: getattr(config, field)
            for field in TopicConfig.__struct_fields__
            if getattr(config, field) != getattr(before, field)
        }
        if changes and not validate_only:
            with context.guard():
                await asyncio.to_thread(lambda: context.plane.topics.alter(name, **changes))
    except (BasaltError, Refused) as error:
        return response | {"error_code": e.code_of(error), "error_message": str(error)}
    return response


def _with(config: TopicConfig, item: Fields, durability: Durability) -> TopicConfig:
    """Return the config after one operation of IncrementalAlterConfigs."""
    name, operation, value = item["name"], item["config_operation"], item.get("value")
    if operation == DELETE:
        return changed(config, name, None, durability)
    if operation not in {SET, APPEND, SUBTRACT}:
        raise InvalidConfigError(f"unknown operation {operation} on {name!r:.80}; use SET, DELETE, APPEND or SUBTRACT")
    if value is None:
        raise InvalidConfigError(f"{name!r:.80} has no value; use DELETE to return to the default")
    if operation != SET and name in SETTINGS:
        if SETTINGS[name].type != LIST:
            raise InvalidConfigError(f"{name} is not a list; use SET or DELETE")
        items = items_of(value_of(config, name))
        if operation == APPEND:
            items += [each for each in items_of(value) if each not in items]
        else:
            removed = items_of(value)
            items = [each for each in items if each not in removed]
        value = ",".join(items)
    return changed(config, name, value, durability)
