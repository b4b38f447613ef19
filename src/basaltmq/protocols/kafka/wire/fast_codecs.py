"""The shape that nearly all produce and fetch requests have, and their answers, read and written at one go.

A client at a thousand messages a second sends each of them by itself: one topic, one partition. The tables (`schema`)
make some fifty calls of such a request, and where the processor has done something else for a millisecond each of them
waits for memory: 40 us, where these take a quarter. So what has this shape is taken as one layout, and anything else
is left to the tables, whose answer is the same (a test compares them).

    fetch, 15 and later   max wait .. session epoch, one topic by id, one partition, nothing forgotten, no rack, no tags
    produce, 9            no transactional id, acks, timeout, one topic by name, one partition, no tags
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct as Layout
from typing import Final
from uuid import UUID

from basaltmq.protocols.kafka.wire.schema import NIL, Fields, read_varint, varint

PRODUCE_VERSION: Final = 9
FETCH_VERSION_MIN: Final = 15
"""The first that does not begin with a replica's id."""

FETCH_VERSION_MAX: Final = 17

_ONE: Final = 2
"""How an array of one counts itself."""

_FETCH: Final = Layout(">iiibiiB16sBiiqiqi5s")
_FETCH_END: Final = b"\x00\x00\x01\x01\x00"
"""No tags of the partition and the topic, nothing forgotten, no rack, no tags."""

_PRODUCE: Final = Layout(">BhiBB")
_PRODUCE_PARTITION: Final = Layout(">Bi")
_PRODUCE_END: Final = b"\x00\x00\x00"
_NAME_BYTES_MAX: Final = 126
"""A name whose length takes a byte."""

_PRODUCED: Final = Layout(">BihqqqBBBBiB")
_FETCHED: Final = Layout(">ihiB16sBihqqqBi")
_FETCHED_END: Final = b"\x00\x00\x00"
_PLAIN: Final = frozenset(("index", "base_offset", "log_append_time_ms", "log_start_offset"))
_NOTHING: Final = ()


@lru_cache(maxsize=1024)
def _topic_id(raw: bytes) -> UUID:
    """To make one costs as much as to read the rest, and clients name the same topics again and again."""
    return UUID(bytes=raw)


def read_fetch(raw: bytes, at: int) -> Fields | None:
    """The body of a fetch request at `at`; None if it has another shape."""
    if len(raw) - at < _FETCH.size:
        return None
    (
        max_wait_ms,
        min_bytes,
        max_bytes,
        isolation_level,
        session_id,
        session_epoch,
        topics,
        topic_id,
        partitions,
        partition,
        leader_epoch,
        offset,
        fetched_epoch,
        start_offset,
        partition_max_bytes,
        end,
    ) = _FETCH.unpack_from(raw, at)
    if topics != _ONE or partitions != _ONE or end != _FETCH_END:
        return None
    wanted = {
        "partition": partition,
        "current_leader_epoch": leader_epoch,
        "fetch_offset": offset,
        "last_fetched_epoch": fetched_epoch,
        "log_start_offset": start_offset,
        "partition_max_bytes": partition_max_bytes,
    }
    return {
        "replica_id": -1,
        "max_wait_ms": max_wait_ms,
        "min_bytes": min_bytes,
        "max_bytes": max_bytes,
        "isolation_level": isolation_level,
        "session_id": session_id,
        "session_epoch": session_epoch,
        "topics": [{"topic": "", "topic_id": _topic_id(topic_id), "partitions": [wanted]}],
        "forgotten_topics": [],
        "rack_id": "",
        "cluster_id": "",
    }


def read_produce(raw: bytes, at: int) -> Fields | None:
    """The body of a produce request at `at`; None if it has another shape."""
    if len(raw) - at < _PRODUCE.size:
        return None
    transactional_id, acks, timeout_ms, topics, name_bytes = _PRODUCE.unpack_from(raw, at)
    at += _PRODUCE.size
    if transactional_id or topics != _ONE or not 0 < name_bytes <= _NAME_BYTES_MAX + 1:
        return None
    end = at + name_bytes - 1
    name = raw[at:end]
    if len(raw) - end <= _PRODUCE_PARTITION.size or not name.isascii():
        return None
    partitions, index = _PRODUCE_PARTITION.unpack_from(raw, end)
    size, at = read_varint(raw, end + _PRODUCE_PARTITION.size)
    end = at + size - 1
    if partitions != _ONE or not size or raw[end : end + 3] != _PRODUCE_END:
        return None
    partition = {"index": index, "records": raw[at:end]}
    return {
        "transactional_id": None,
        "acks": acks,
        "timeout_ms": timeout_ms,
        "topics": [{"name": name.decode(), "partitions": [partition]}],
    }


def write_produced(body: Fields) -> bytes | None:
    """The answer to a produce request; None if it has another shape."""
    topics = body["topics"]
    if len(topics) != 1 or len(body) != 1 or len(topics[0]["partitions"]) != 1:
        return None
    name: bytes = topics[0]["name"].encode()
    answer = topics[0]["partitions"][0]
    if answer.keys() != _PLAIN or len(name) > _NAME_BYTES_MAX:
        # An error, or a batch that was there already.
        return None
    rest = _PRODUCED.pack(
        _ONE,
        answer["index"],
        0,
        answer["base_offset"],
        answer["log_append_time_ms"],
        answer["log_start_offset"],
        1,
        0,
        0,
        0,
        0,
        0,
    )
    return bytes((_ONE, len(name) + 1)) + name + rest


def write_fetched(body: Fields, out: list[bytes]) -> bool:
    """Add the answer to a fetch request; False, and nothing added, if it has another shape."""
    topics = body.get("topics", _NOTHING)
    if len(topics) != 1 or len(topics[0]["partitions"]) != 1 or "error_code" in body:
        return False
    topic = topics[0]
    answer = topic["partitions"][0]
    batches = answer.get("records")
    aborted = answer.get("aborted_transactions")
    if "error_code" in answer or aborted or not isinstance(batches, list):
        return False
    out.append(
        _FETCHED.pack(
            0,
            0,
            body.get("session_id", 0),
            _ONE,
            topic.get("topic_id", NIL).bytes,
            _ONE,
            answer["partition"],
            0,
            answer.get("high_watermark", -1),
            answer.get("last_stable_offset", -1),
            answer.get("log_start_offset", -1),
            0 if aborted is None else 1,
            -1,
        )
    )
    out.append(varint(sum(map(len, batches)) + 1))
    out += batches
    out.append(_FETCHED_END)
    return True
