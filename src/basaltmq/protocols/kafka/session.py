"""Requests about the connection and the broker: versions, authentication, coordinators, producer ids.

PLAIN is an authorization id, a name and a password with NUL between them, checked against the broker's users; SCRAM is
told in `scram`. SaslAuthenticate carries them from version 1 of SaslHandshake on; after version 0 clients send them
bare, with a size in front, and are answered the same way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from basaltmq.broker.auth.permissions import READ, WRITE
from basaltmq.broker.auth.scram import SHA_256, SHA_512
from basaltmq.errors import AuthenticationError
from basaltmq.protocols.kafka.context import NODE_ID, Answer, Client, Desk
from basaltmq.protocols.kafka.transactions.requests import initialize
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import API_VERSIONS, APIS, Request
from basaltmq.protocols.kafka.wire.schema import Encoded, Fields, encode_array
from basaltmq.protocols.kafka.wire.session import API_VERSIONS_KEY

PLAIN: Final = "PLAIN"
MECHANISMS: Final = (PLAIN, SHA_256, SHA_512)
GROUP: Final = 0
TRANSACTION: Final = 1

GROUP_VERSION: Final = "group.version"
"""The feature whose level 1 is consumer groups of the second protocol."""

FEATURES_SINCE: Final = 3
ZERO_FEATURES_SINCE: Final = 4
"""Clients of the versions before take no feature that can be at level 0."""


def api_versions(version: int, code: int = e.NONE) -> Fields:
    """What is announced: exactly what is served."""
    answer: Fields = {"error_code": code, "api_keys": _api_keys(version)}
    if version >= FEATURES_SINCE:
        level = {"name": GROUP_VERSION, "max_version_level": 1, "min_version_level": 1}
        answer |= {"finalized_features_epoch": 0, "finalized_features": [level]}
    if version >= ZERO_FEATURES_SINCE:
        answer["supported_features"] = [{"name": GROUP_VERSION, "min_version": 0, "max_version": 1}]
    return answer


@lru_cache
def _api_keys(version: int) -> Encoded:
    """The same for every connection, each of which begins with it; there are as many as versions of ApiVersions."""
    served = [
        {"api_key": api.key, "min_version": api.version_min, "max_version": api.version_max} for api in APIS.values()
    ]
    return encode_array(API_VERSIONS_KEY, served, version, version >= APIS[API_VERSIONS].flexible_since)


def read_plain(raw: bytes) -> tuple[str, str]:
    """The name and the password."""
    parts = raw.split(b"\0")
    if len(parts) != 3:
        raise AuthenticationError("PLAIN is an authorization id, a name and a password with a NUL between each two")
    try:
        actor, name, password = (part.decode() for part in parts)
    except UnicodeDecodeError:
        raise AuthenticationError("the name or the password is not UTF-8") from None
    if actor not in {"", name}:
        raise AuthenticationError(f"user '{name}' may not act for another")
    return name, password


def find_coordinator(desk: Desk, client: Client, request: Request) -> Answer:
    body = request.body
    if request.version < 4:
        return _coordinator(client, body["key_type"], body["key"])
    keys = body["coordinator_keys"]
    return {"coordinators": [{"key": key, **_coordinator(client, body["key_type"], key)} for key in keys]}


def _coordinator(client: Client, kind: int, key: str) -> Fields:
    """Told to those who may use the group or the transactional id."""
    if kind == GROUP:
        code, message = e.GROUP_AUTHORIZATION_FAILED, f"read access to group {key!r} refused"
        may_use = client.may(READ, key)
    elif kind == TRANSACTION:
        code, message = e.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, f"write access to transactional id {key!r} refused"
        may_use = client.may(WRITE, key)
    else:
        code, message = e.INVALID_REQUEST, "groups and transactions have a coordinator here"
        may_use = False
    if not may_use:
        return {"node_id": -1, "host": "", "port": -1, "error_code": code, "error_message": message}
    host, port = client.address()
    return {"node_id": NODE_ID, "host": host, "port": port}


async def init_producer_id(desk: Desk, client: Client, request: Request) -> Fields:
    if request.body["transactional_id"] is not None:
        return await initialize(desk, client, request)
    known, epoch = request.body["producer_id"], request.body["producer_epoch"]
    if known >= 0 and 0 <= epoch < (1 << 15) - 1:
        return {"producer_id": known, "producer_epoch": epoch + 1}
    with desk.guard():
        producer_id, has_written = desk.producers.next_id()
        if has_written:
            await desk.vhost.commit.durable()
    return {"producer_id": producer_id, "producer_epoch": 0}
