"""A configured record: the unit of the configuration store, and its row.

    configured_objects            uuid text            ->  {"type": ..., "attributes": {...}}      JSON
    configured_object_hierarchy   child|parent type    ->  parent uuid text

A record without parents is at the top. Encoding validates the caller's data. Decoding validates the stored data, and
its errors name the damaged object.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec

from basaltmq.catalog.attributes import Attributes, encode_attributes
from basaltmq.decoding import json_decoder
from basaltmq.errors import CorruptionError, InvalidArgumentError

ROOT: Final = UUID(int=0)
"""The parent of top-level objects. No object may have this id."""

NAME: Final = "name"
"""The attribute from which the name index is built."""

TYPE_BYTES_MAX: Final = 255
"""Types are short words defined by Basalt, not user text."""

NAME_BYTES_MAX: Final = 0xFFFF
"""The limit of a key, and enough for the longest names of any protocol (MQTT topics)."""

_TEXT: Final = msgspec.json.Encoder().encode


class ConfiguredRecord(msgspec.Struct, frozen=True):
    """An object in the configuration store."""

    id: UUID
    type: str
    attributes: Attributes
    parents: dict[str, UUID] = {}
    """Parent type -> parent id."""


class StoredValue(msgspec.Struct):
    """The row of an object."""

    type: str
    attributes: dict[str, Any]


_decode: Final = json_decoder(StoredValue)


def encode_value(record: ConfiguredRecord) -> bytes:
    """Encode a caller's record after all checks that need no other row."""
    object_id = record.id
    if not isinstance(object_id, UUID) or object_id == ROOT:
        raise InvalidArgumentError(f"the id of an object must be a UUID other than nil, not {object_id!r:.80}")
    check_type(record.type)
    if not isinstance(record.parents, dict):
        raise InvalidArgumentError(f"the parents of {object_id} must be a dict of type to UUID")
    for parent_type, parent in record.parents.items():
        check_type(parent_type)
        if not isinstance(parent, UUID) or parent == object_id:
            raise InvalidArgumentError(f"the {parent_type} parent of {object_id} must be the UUID of another object")
    raw = encode_attributes(record.attributes, record.type, object_id)
    name = record.attributes.get(NAME)
    if isinstance(name, str):
        check_name(name)
    return b'{"type":%b,"attributes":%b}' % (_TEXT(record.type), raw)


def decode_value(raw: bytes, object_id: UUID) -> StoredValue:
    try:
        return _decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"the row of object {object_id} is damaged: {error}") from error


def check_type(value: object) -> None:
    if not isinstance(value, str) or not 0 < _utf8_bytes(value, "a type") <= TYPE_BYTES_MAX:
        raise InvalidArgumentError(f"a type must be text of 1 to {TYPE_BYTES_MAX} bytes, not {value!r:.80}")


def check_name(value: object) -> None:
    if not isinstance(value, str):
        raise InvalidArgumentError(f"a name must be a str, not {type(value).__name__}")
    size = _utf8_bytes(value, "a name")
    if size > NAME_BYTES_MAX:
        raise InvalidArgumentError(f"a name of {size} bytes exceeds the limit of {NAME_BYTES_MAX} bytes of UTF-8")


def encode_parent(parent: UUID) -> bytes:
    return str(parent).encode()


def decode_parent(raw: bytes, child: UUID) -> UUID:
    try:
        return UUID(raw.decode("ascii"))
    except ValueError:
        raise CorruptionError(f"the parent link of object {child} is damaged: {raw[:48]!r}") from None


def _utf8_bytes(text: str, what: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{what} must be valid Unicode, not {ascii(text)[:80]}") from None
