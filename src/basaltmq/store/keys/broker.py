"""Keys of the broker: exchanges, bindings, policies and API keys.

Layouts:

    exchange         | 'e' | exchange name |
    binding          | 'b' | lp(source) | kind (1) | lp(destination) | lp(routing key) | hash of arguments u64 |
    policy           | 'p' | kind (1) | policy name |
    API key          | key id |
"""

from __future__ import annotations

from typing import Final

from basaltmq.store.keys.parts import U64, decode_unprefixed, lp, malformed, take_text, unprefixed

_EXCHANGE: Final = b"e"
_BINDING: Final = b"b"
_POLICY: Final = b"p"


def exchange_key(name: str) -> bytes:
    return _EXCHANGE + unprefixed(name)


def exchange_prefix() -> bytes:
    return _EXCHANGE


def decode_exchange_key(key: bytes) -> str:
    if key[:1] != _EXCHANGE:
        raise malformed(key)
    return decode_unprefixed(key[1:])


def binding_key(source: str, kind: bytes, destination: str, routing_key: str, arguments_hash: int) -> bytes:
    """`kind` is the kind of the destination."""
    assert len(kind) == 1, f"the kind of a destination is one byte, not {kind!r}"
    return _BINDING + lp(source) + kind + lp(destination) + lp(routing_key) + U64.pack(arguments_hash)


def binding_prefix() -> bytes:
    return _BINDING


def decode_binding_key(key: bytes) -> tuple[str, bytes, str, str, int]:
    if key[:1] != _BINDING:
        raise malformed(key)
    source, at = take_text(key, 1)
    kind = key[at : at + 1]
    destination, at = take_text(key, at + 1)
    routing_key, at = take_text(key, at)
    if len(kind) != 1 or len(key) != at + 8:
        raise malformed(key)
    number: int = U64.unpack_from(key, at)[0]
    return source, kind, destination, routing_key, number


def policy_key(kind: bytes, name: str) -> bytes:
    """`kind` separates user policies from operator policies."""
    return policy_prefix(kind) + unprefixed(name)


def policy_prefix(kind: bytes) -> bytes:
    assert len(kind) == 1, f"the kind of a policy is one byte, not {kind!r}"
    return _POLICY + kind


def decode_policy_key(key: bytes) -> tuple[bytes, str]:
    if key[:1] != _POLICY or len(key) < 2:
        raise malformed(key)
    return key[1:2], decode_unprefixed(key[2:])


def api_key_key(key_id: str) -> bytes:
    return unprefixed(key_id)


def decode_api_key_key(key: bytes) -> str:
    return decode_unprefixed(key)
