"""Fast path: codecs for the most common shape of Produce and Fetch messages, as one fixed layout.

A client with 1000 messages per second sends each alone: one topic, one partition. The general codecs (`schema.py`) make
about 50 calls for such a message. With cold CPU caches that takes 40 us; the fixed layouts take a quarter. Messages of
any other shape go to the general codecs. A test checks that both give the same result.

    Fetch 15 and later    max wait .. session epoch, one topic by id, one partition, nothing forgotten, no rack, no tags
    Produce 9             no transactional id, acks, timeout, one topic by name, one partition, no tags
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct as Layout
from typing import Final
from uuid import UUID

from basaltmq.protocols.kafka.wire.schema import NIL, Fields, read_varint
from basaltmq.varints import varint

PRODUCE_VERSION: Final = 9
FETCH_VERSION_MIN: Final = 15
"""First version that does not start with a replica id."""

FETCH_VERSION_MAX: Final = 17

_ONE: Final = 2
"""Encoded length of a compact array with one element."""

_FETCH: Final = Layout(">iiibiiB16sBiiqiqi5s")
_FETCH_END: Final = b"\x00\x00\x01\x01\x00"
"""No tags in partition and topic, no forgotten topics, no rack, no tags."""

_PRODUCE: Final = Layout(">BhiBB")
_PRODUCE_PARTITION: Final = Layout(">Bi")
_PRODUCE_END: Final = b"\x00\x00\x00"
_NAME_BYTES_MAX: Final = 126
"""Longest name whose encoded length takes one byte."""

_PRODUCED: Final = Layout(">BihqqqBBBBiB")
_FETCHED: Final = Layout(">ihiB16sBihqqqBi")
_FETCHED_END: Final = b"\x00\x00\x00"
_PLAIN: Final = frozenset(("index", "base_offset", "log_append_time_ms", "log_start_offset"))
_NOTHING: Final = ()


@lru_cache(maxsize=1024)
def _topic_id(raw: bytes) -> UUID:
    """Cached, because a UUID costs as much as the rest of the request and clients repeat their topics."""
    return UUID(bytes=raw)


def read_fetch(raw: bytes, at: int) -> Fields | None:
    """Return the body of a Fetch request at `at`; None if it has another shape."""
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
    """Return the body of a Produce request at `at`; None if it has another shape."""
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
    """Return the encoded Produce response; None if it has another shape."""
    topics = body["topics"]
    if len(topics) != 1 or len(body) != 1 or len(topics[0]["partitions"]) != 1:
        return None
    name: bytes = topics[0]["name"].encode()
    response = topics[0]["partitions"][0]
    if response.keys() != _PLAIN or len(name) > _NAME_BYTES_MAX:
        # An error, or a repeated batch.
        return None
    rest = _PRODUCED.pack(
        _ONE,
        response["index"],
        0,
        response["base_offset"],
        response["log_append_time_ms"],
        response["log_start_offset"],
        1,
        0,
        0,
        0,
        0,
        0,
    )
    return bytes((_ONE, len(name) + 1)) + name + rest


def write_fetched(body: Fields, out: list[bytes]) -> bool:
    """Append a Fetch response. Return False and append nothing if it has another shape."""
    topics = body.get("topics", _NOTHING)
    if len(topics) != 1 or len(topics[0]["partitions"]) != 1 or "error_code" in body:
        return False
    topic = topics[0]
    response = topic["partitions"][0]
    batches = response.get("records")
    aborted = response.get("aborted_transactions")
    if "error_code" in response or aborted or not isinstance(batches, list):
        return False
    out.append(
        _FETCHED.pack(
            0,
            0,
            body.get("session_id", 0),
            _ONE,
            topic.get("topic_id", NIL).bytes,
            _ONE,
            response["partition"],
            0,
            response.get("high_watermark", -1),
            response.get("last_stable_offset", -1),
            response.get("log_start_offset", -1),
            0 if aborted is None else 1,
            -1,
        )
    )
    out.append(varint(sum(map(len, batches)) + 1))
    out += batches
    out.append(_FETCHED_END)
    return True
