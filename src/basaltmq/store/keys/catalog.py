"""Keys of configured objects, preferences and AMQP 1.0 links.

Layouts:

    configured       | uuid text (36 bytes) |
    hierarchy        | child uuid text | '|' | parent type |
    object name      | parent uuid (16) | lp(type) | name |
    preference       | uuid (16) |
    deleted object   | uuid (16) |
    link             | lp(remote container) | lp(link name) | role u8 |
    link delivery    | lp(remote container) | lp(link name) | delivery tag |
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final
from uuid import UUID

from basaltmq.ids import ID_BYTES
from basaltmq.store.keys.parts import decode_unprefixed, exactly, lp, malformed, take_text, unprefixed

_UUID_TEXT_BYTES: Final = 36

PREFIXES_CACHED_MAX: Final = 256
"""Prefixes of names in the cache. Most names of a process have the same few parents."""


def configured_key(object_id: UUID) -> bytes:
    return str(object_id).encode()


def decode_configured_key(key: bytes) -> UUID:
    try:
        object_id = UUID(key.decode("ascii"))
    except ValueError:
        raise malformed(key) from None
    if configured_key(object_id) != key:
        raise malformed(key)
    return object_id


def hierarchy_key(child: UUID, parent_type: str) -> bytes:
    return hierarchy_prefix(child) + unprefixed(parent_type)


def hierarchy_prefix(child: UUID) -> bytes:
    return configured_key(child) + b"|"


def decode_hierarchy_key(key: bytes) -> tuple[UUID, str]:
    if key[_UUID_TEXT_BYTES : _UUID_TEXT_BYTES + 1] != b"|":
        raise malformed(key)
    try:
        parent_type = key[_UUID_TEXT_BYTES + 1 :].decode()
    except UnicodeDecodeError:
        raise malformed(key) from None
    return decode_configured_key(key[:_UUID_TEXT_BYTES]), parent_type


def object_name_key(parent: UUID, kind: str, name: str) -> bytes:
    return object_name_prefix(parent, kind) + unprefixed(name)


@lru_cache(maxsize=PREFIXES_CACHED_MAX)
def object_name_prefix(parent: UUID, kind: str | None = None) -> bytes:
    return parent.bytes if kind is None else parent.bytes + lp(kind)


def decode_object_name_key(key: bytes) -> tuple[UUID, str, str]:
    kind, at = take_text(key, ID_BYTES)
    return UUID(bytes=key[:ID_BYTES]), kind, decode_unprefixed(key[at:])


def preference_key(preference_id: UUID) -> bytes:
    return preference_id.bytes


def decode_preference_key(key: bytes) -> UUID:
    exactly(key, ID_BYTES)
    return UUID(bytes=key)


def deleted_object_key(object_id: UUID) -> bytes:
    return object_id.bytes


def decode_deleted_object_key(key: bytes) -> UUID:
    exactly(key, ID_BYTES)
    return UUID(bytes=key)


def link_key(remote_container: str, link_name: str, role: int) -> bytes:
    return lp(remote_container) + lp(link_name) + bytes((role,))


def link_delivery_key(remote_container: str, link_name: str, tag: bytes) -> bytes:
    """Return the key of a delivery on a link. The tag follows the names, so the deliveries of a link are one range."""
    return lp(remote_container) + lp(link_name) + tag


def decode_link_key(key: bytes) -> tuple[str, str, int]:
    container, at = take_text(key, 0)
    name, at = take_text(key, at)
    exactly(key, at + 1)
    return container, name, key[at]
