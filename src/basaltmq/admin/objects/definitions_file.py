"""The JSON format of definitions, as RabbitMQ's `export_definitions` and Basalt write it.

Unknown fields are ignored, so that files of any RabbitMQ since 3.6 are accepted. Tags are a list, or in older files
a comma-separated string.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from basaltmq.admin.http.message import HttpError
from basaltmq.decoding import converter, json_decoder
from basaltmq.errors import InvalidConfigError


class UserEntry(msgspec.Struct):
    """A user with a password hash."""

    name: str
    password_hash: str | None = None
    hashing_algorithm: str | None = None
    tags: list[str] | str = []

    def tag_list(self) -> list[str]:
        parts = self.tags.split(",") if isinstance(self.tags, str) else self.tags
        return [part.strip() for part in parts if part.strip()]


class VhostEntry(msgspec.Struct):
    name: str
    description: str | None = None
    metadata: dict[str, Any] | None = None

    def text(self) -> str:
        return self.description or str((self.metadata or {}).get("description") or "")


class PermissionEntry(msgspec.Struct):
    """Permissions of a user in a virtual host."""

    user: str
    vhost: str
    configure: str
    write: str
    read: str


class TopicPermissionEntry(msgspec.Struct):
    """Permissions of a user for routing keys of a topic exchange."""

    user: str
    vhost: str
    exchange: str
    write: str
    read: str


class PolicyEntry(msgspec.Struct, rename={"apply_to": "apply-to"}):
    name: str
    pattern: str
    definition: dict[str, Any]
    vhost: str | None = None
    priority: int = 0
    apply_to: str = "all"


class QueueEntry(msgspec.Struct):
    name: str
    vhost: str | None = None
    durable: bool = True
    auto_delete: bool = False
    arguments: dict[str, Any] = {}
    type: str | None = None


class ExchangeEntry(msgspec.Struct):
    name: str
    vhost: str | None = None
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    internal: bool = False
    arguments: dict[str, Any] = {}


class BindingEntry(msgspec.Struct):
    source: str
    destination: str
    destination_type: str = "queue"
    routing_key: str = ""
    arguments: dict[str, Any] = {}
    vhost: str | None = None


class ParameterEntry(msgspec.Struct):
    """A parameter of a RabbitMQ plugin or limit. Operator policies are stored as parameters."""

    component: str
    name: str
    value: Any = None
    vhost: str | None = None


class MqttRuleEntry(msgspec.Struct):
    """A rule that copies MQTT messages to a stream."""

    name: str
    filter: str
    topic: str
    key: str = "none"
    vhost: str | None = None


class Definitions(msgspec.Struct):
    """A definitions file."""

    users: list[UserEntry] = []
    vhosts: list[VhostEntry] = []
    permissions: list[PermissionEntry] = []
    topic_permissions: list[TopicPermissionEntry] = []
    policies: list[PolicyEntry] = []
    queues: list[QueueEntry] = []
    exchanges: list[ExchangeEntry] = []
    bindings: list[BindingEntry] = []
    parameters: list[ParameterEntry] = []
    mqtt_rules: list[MqttRuleEntry] = []


_decode: Final = json_decoder(Definitions)
policy_entry: Final = converter(PolicyEntry)


def read_definitions(path: Path) -> Definitions:
    """Read a definitions file. Raise InvalidConfigError if it is invalid."""
    try:
        return _decode(path.read_bytes())
    except OSError as error:
        raise InvalidConfigError(f"cannot read load_definitions {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"load_definitions {path} is not a valid definitions file: {error}") from error


def queue_arguments(entry: QueueEntry) -> dict[str, Any]:
    """Return the arguments of a queue, with the type that RabbitMQ 4 writes as a separate field."""
    if entry.type is None or "x-queue-type" in entry.arguments or entry.type == "classic":
        return entry.arguments
    return {**entry.arguments, "x-queue-type": entry.type}


def vhost_of(entry: Any, default: str | None) -> str:
    name = entry.vhost if entry.vhost is not None and default is None else default
    if name is None:
        raise HttpError(400, f"{type(entry).__name__.removesuffix('Entry').lower()} {entry!r:.80} has no vhost")
    return name
