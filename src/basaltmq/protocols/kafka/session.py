"""Handlers for the connection and the broker: ApiVersions, SASL PLAIN, FindCoordinator, InitProducerId.

From SaslHandshake version 1 on, SaslAuthenticate carries the SASL messages. After version 0, client and broker send
them as raw frames with a size prefix.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from basaltmq.broker.auth.acls import Operation, Resource
from basaltmq.broker.auth.permissions import READ, WRITE
from basaltmq.broker.auth.sasl import PLAIN
from basaltmq.broker.auth.scram import SHA_256, SHA_512
from basaltmq.protocols.kafka.context import NODE_ID, Client, Context, Response
from basaltmq.protocols.kafka.transactions.requests import initialize
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import API_VERSIONS, API_VERSIONS_KEY, APIS, Request
from basaltmq.protocols.kafka.wire.schema import Encoded, Fields, encode_array

MECHANISMS: Final = (PLAIN, SHA_256, SHA_512)
GROUP: Final = 0
TRANSACTION: Final = 1

GROUP_VERSION: Final = "group.version"
"""Feature whose level 1 means KIP-848 consumer groups."""

FEATURES_SINCE: Final = 3
ZERO_FEATURES_SINCE: Final = 4
"""Clients of earlier versions reject features that support level 0."""


def api_versions(version: int, code: int = e.NONE) -> Fields:
    """Return the ApiVersions response: exactly the APIs that `APIS` defines."""
    response: Fields = {"error_code": code, "api_keys": _api_keys(version)}
    if version >= FEATURES_SINCE:
        level = {"name": GROUP_VERSION, "max_version_level": 1, "min_version_level": 1}
        response |= {"finalized_features_epoch": 0, "finalized_features": [level]}
    if version >= ZERO_FEATURES_SINCE:
        response["supported_features"] = [{"name": GROUP_VERSION, "min_version": 0, "max_version": 1}]
    return response


@lru_cache
def _api_keys(version: int) -> Encoded:
    """Return the encoded list of APIs. Cached, because every connection starts with it; one entry per version."""
    served = [
        {"api_key": api.key, "min_version": api.version_min, "max_version": api.version_max} for api in APIS.values()
    ]
    return encode_array(API_VERSIONS_KEY, served, version, version >= APIS[API_VERSIONS].flexible_since)


def find_coordinator(context: Context, client: Client, request: Request) -> Response:
    body = request.body
    if request.version < 4:
        return _coordinator(client, body["key_type"], body["key"])
    keys = body["coordinator_keys"]
    return {"coordinators": [{"key": key, **_coordinator(client, body["key_type"], key)} for key in keys]}


def _coordinator(client: Client, kind: int, key: str) -> Fields:
    """Return the coordinator, if the client has permission for the group or the transactional id."""
    if kind == GROUP:
        code, message = e.GROUP_AUTHORIZATION_FAILED, f"read access to group {key!r} refused"
        may_use = client.may(READ, key, Operation.DESCRIBE, Resource.GROUP)
    elif kind == TRANSACTION:
        code, message = e.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, f"write access to transactional id {key!r} refused"
        may_use = client.may(WRITE, key, Operation.DESCRIBE, Resource.TRANSACTIONAL_ID)
    else:
        code, message = e.INVALID_REQUEST, f"unknown coordinator type {kind}; use 0 (group) or 1 (transaction)"
        may_use = False
    if not may_use:
        return {"node_id": -1, "host": "", "port": -1, "error_code": code, "error_message": message}
    host, port = client.address()
    return {"node_id": NODE_ID, "host": host, "port": port}


async def init_producer_id(context: Context, client: Client, request: Request) -> Fields:
    if request.body["transactional_id"] is not None:
        return await initialize(context, client, request)
    known, epoch = request.body["producer_id"], request.body["producer_epoch"]
    if known >= 0 and 0 <= epoch < (1 << 15) - 1:
        return {"producer_id": known, "producer_epoch": epoch + 1}
    with context.guard():
        producer_id, has_written = context.producers.next_id()
        if has_written:
            await context.vhost.commit.durable()
    return {"producer_id": producer_id, "producer_epoch": 0}
