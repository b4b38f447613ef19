"""Handlers for transactions: permissions, error codes by version, and the form of responses.

`Transactions` implements the operations. A fenced producer gets PRODUCER_FENCED in versions that have that code, and
INVALID_PRODUCER_EPOCH in earlier ones. A transactional id needs write permission under its name, like a topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from basaltmq.broker.auth.acls import Operation, Resource
from basaltmq.broker.auth.permissions import READ, WRITE
from basaltmq.errors import BasaltError
from basaltmq.protocols.kafka.groups.classic_requests import group_error
from basaltmq.protocols.kafka.groups.offset_requests import check_commits
from basaltmq.protocols.kafka.transactions.row import State, Transaction
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields

if TYPE_CHECKING:
    from basaltmq.protocols.kafka.context import Client, Context, Response

FENCED_SINCE: Final = 2
FENCED_SINCE_INIT: Final = 4
MEMBERS_SINCE: Final = 3
LISTED_MAX: Final = 10_000


def _code(error: BasaltError | Refused, knows_fenced: bool) -> int:
    if not isinstance(error, Refused):
        return e.code_of(error)
    if error.code == e.PRODUCER_FENCED and not knows_fenced:
        return e.INVALID_PRODUCER_EPOCH
    return error.code


async def initialize(context: Context, client: Client, request: Request) -> Fields:
    """InitProducerId with a transactional id."""
    body = request.body
    transactional_id = body["transactional_id"]
    if not client.may(WRITE, transactional_id, resource=Resource.TRANSACTIONAL_ID):
        return {"error_code": e.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    expected = None if body["producer_id"] < 0 else (body["producer_id"], body["producer_epoch"])
    try:
        producer_id, epoch = await context.transactions.initialize(
            transactional_id, body["transaction_timeout_ms"], expected
        )
    except (BasaltError, Refused) as error:
        return {"error_code": _code(error, request.version >= FENCED_SINCE_INIT)}
    return {"producer_id": producer_id, "producer_epoch": epoch}


async def add_partitions(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    requested = [(topic["name"], partition) for topic in body["topics"] for partition in topic["partitions"]]
    codes: dict[tuple[str, int], int] = {}
    shards: set[int] = set()
    may_use = client.may(WRITE, body["transactional_id"], resource=Resource.TRANSACTIONAL_ID)
    for name, partition in requested:
        try:
            client.check(WRITE, name)
            shards.add(context.engine(context.topic(name), partition)[1])
        except BasaltError as error:
            codes[name, partition] = e.code_of(error)
    if not may_use:
        codes = dict.fromkeys(requested, e.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    elif codes:
        # The request succeeds or fails as a whole.
        codes = {each: codes.get(each, e.OPERATION_NOT_ATTEMPTED) for each in requested}
    else:
        code = await _added(context, body, request.version, frozenset(shards), frozenset())
        codes = dict.fromkeys(requested, code)
    return {
        "results": [
            {
                "name": topic["name"],
                "results": [
                    {"partition_index": partition, "error_code": codes[topic["name"], partition]}
                    for partition in topic["partitions"]
                ],
            }
            for topic in body["topics"]
        ]
    }


async def add_offsets(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    if not client.may(WRITE, body["transactional_id"], resource=Resource.TRANSACTIONAL_ID):
        return {"error_code": e.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    code = group_error(client, body["group_id"])
    if not code:
        code = await _added(context, body, request.version, frozenset(), frozenset((body["group_id"],)))
    return {"error_code": code}


async def _added(context: Context, body: Fields, version: int, shards: frozenset[int], groups: frozenset[str]) -> int:
    try:
        await context.transactions.add(
            body["transactional_id"], body["producer_id"], body["producer_epoch"], shards=shards, groups=groups
        )
    except (BasaltError, Refused) as error:
        return _code(error, version >= FENCED_SINCE)
    return e.NONE


async def commit_offsets(context: Context, client: Client, request: Request) -> Fields:
    """TxnOffsetCommit."""
    body = request.body
    code = group_error(client, body["group_id"])
    if not client.may(WRITE, body["transactional_id"], resource=Resource.TRANSACTIONAL_ID):
        code = e.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    if not code and request.version >= MEMBERS_SINCE and body["generation_id"] >= 0:
        group = context.groups.get(body["group_id"])
        consumers = context.consumer_groups.get(body["group_id"])
        code = e.ILLEGAL_GENERATION
        if consumers is not None:
            wrong = consumers.epoch_error(body["member_id"], body["generation_id"])
            # TxnOffsetCommit has no other error code for a stale member epoch.
            code = e.ILLEGAL_GENERATION if wrong == e.STALE_MEMBER_EPOCH else wrong
        elif group is not None:
            code = group.commit_error(body["member_id"], body["group_instance_id"], body["generation_id"])
    commits = await check_commits(context, client, body["topics"], code, context.now_ms())
    if commits.valid:
        try:
            await context.transactions.commit_offsets(
                body["transactional_id"], body["producer_id"], body["producer_epoch"], body["group_id"], commits.valid
            )
        except (BasaltError, Refused) as error:
            commits.refuse(_code(error, False))
    return {"topics": commits.topics}


async def end(context: Context, client: Client, request: Request) -> Fields:
    body = request.body
    if not client.may(WRITE, body["transactional_id"], resource=Resource.TRANSACTIONAL_ID):
        return {"error_code": e.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    try:
        await context.transactions.end(
            body["transactional_id"], body["producer_id"], body["producer_epoch"], body["committed"]
        )
    except (BasaltError, Refused) as error:
        return {"error_code": _code(error, request.version >= FENCED_SINCE)}
    return {}


def describe(context: Context, client: Client, request: Request) -> Response:
    """DescribeTransactions."""
    with context.guard():
        return {"transaction_states": [_described(context, client, each) for each in request.body["transactional_ids"]]}


def _described(context: Context, client: Client, transactional_id: str) -> Fields:
    if not client.may(WRITE, transactional_id, Operation.DESCRIBE, Resource.TRANSACTIONAL_ID):
        return {"transactional_id": transactional_id, "error_code": e.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    row = context.transactions.get(transactional_id)
    if row is None:
        return {"transactional_id": transactional_id, "error_code": e.TRANSACTIONAL_ID_NOT_FOUND}
    is_open = row.state is State.ONGOING or row.state.is_decided
    return {
        "transactional_id": transactional_id,
        "transaction_state": row.state.label,
        "transaction_timeout_ms": row.timeout_ms,
        "transaction_start_time_ms": row.began_ms if is_open else -1,
        "producer_id": row.producer_id,
        "producer_epoch": row.epoch,
        "topics": _topics(context, row),
    }


def _topics(context: Context, row: Transaction) -> list[Fields]:
    by_topic: dict[str, list[int]] = {}
    for shard in sorted(row.shards):
        try:
            meta = context.plane.shards.get(shard)
        except BasaltError:
            continue
        topic = context.plane.topics.summary_of(meta.topic_id)
        if topic is not None:
            by_topic.setdefault(topic.name, []).append(meta.partition)
    return [{"topic": name, "partitions": partitions} for name, partitions in by_topic.items()]


def listed(context: Context, client: Client, request: Request) -> Response:
    """ListTransactions."""
    labels = {state.label for state in State}
    wanted, producers = set(request.body["state_filters"]), set(request.body["producer_id_filters"])
    found: list[Fields] = []
    with context.guard():
        for row in context.transactions.all():
            is_asked = (not wanted or row.state.label in wanted) and (not producers or row.producer_id in producers)
            if is_asked and client.may(WRITE, row.id, Operation.DESCRIBE, Resource.TRANSACTIONAL_ID):
                found.append(
                    {
                        "transactional_id": row.id,
                        "producer_id": row.producer_id,
                        "transaction_state": row.state.label,
                    }
                )
            if len(found) >= LISTED_MAX:
                break
    return {"unknown_state_filters": sorted(wanted - labels), "transaction_states": found}


def describe_producers(context: Context, client: Client, request: Request) -> Response:
    """DescribeProducers: recent producers of a partition, with the start offsets of open transactions."""
    return {
        "topics": [
            {
                "name": topic["name"],
                "partitions": [_producers(context, client, topic["name"], each) for each in topic["partition_indexes"]],
            }
            for topic in request.body["topics"]
        ]
    }


def _producers(context: Context, client: Client, name: str, partition: int) -> Fields:
    try:
        client.check(READ, name)
        engine, shard = context.engine(context.topic(name), partition)
        with context.guard():
            known = context.producers.known(engine, shard)
        state = engine.state_of(shard)
        with state.lock:
            undecided = dict(state.undecided or {})
    except BasaltError as error:
        return {"partition_index": partition, "error_code": e.code_of(error), "error_message": str(error)}
    return {
        "partition_index": partition,
        "active_producers": [
            {
                "producer_id": producer_id,
                "producer_epoch": producer.epoch,
                "last_sequence": producer.batches[-1][1] if producer.batches else -1,
                "current_txn_start_offset": undecided.get(producer_id, -1),
            }
            for producer_id, producer in known.items()
        ],
    }
