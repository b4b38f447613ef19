"""Requests and responses of the common shape have the same result in the fast codecs and in the schemas."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import product
from typing import Any
from uuid import UUID

import pytest

from basaltmq.errors import MalformedRequestError
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import fast_codecs
from basaltmq.protocols.kafka.wire.schema import Fields

SEED = 20_261_116
ONE, OTHER = UUID(int=7 << 64), UUID(int=9)
FETCHES = range(fast_codecs.FETCH_VERSION_MIN, fast_codecs.FETCH_VERSION_MAX + 1)


def plain_body(key: int, version: int, raw: bytes) -> Fields:
    """Decode a request's body by the schemas."""
    found: Fields = k.APIS[key].request.codec(version, True).read(raw, 0)[0]
    return found


def plain_answer(key: int, version: int, body: Fields) -> bytes:
    out: list[bytes] = []
    k.APIS[key].response.codec(version, True).write(body, out)
    return b"".join(out)


def body_of(key: int, version: int, body: Fields) -> bytes:
    out: list[bytes] = []
    k.APIS[key].request.codec(version, True).write(body, out)
    return b"".join(out)


def fetch_body(partitions: int, topics: int = 1, **more: Any) -> Fields:
    wanted = [
        {
            "partition": at,
            "current_leader_epoch": 3,
            "fetch_offset": 1 << 40,
            "last_fetched_epoch": -1,
            "log_start_offset": 5,
            "partition_max_bytes": 1 << 20,
        }
        for at in range(partitions)
    ]
    return {
        "max_wait_ms": 500,
        "min_bytes": 1,
        "max_bytes": 50 << 20,
        "isolation_level": 1,
        "session_id": 12,
        "session_epoch": 4,
        "topics": [{"topic_id": (ONE, OTHER)[at], "partitions": wanted} for at in range(topics)],
        "forgotten_topics": [],
        "rack_id": "",
        **more,
    }


def produce_body(name: str = "orders", records: bytes | None = b"r" * 400, **more: Any) -> Fields:
    partition = {"index": 3, "records": records}
    body = {"transactional_id": None, "acks": -1, "timeout_ms": 30_000}
    return {**body, "topics": [{"name": name, "partitions": [partition]}], **more}


@pytest.mark.spec("B1")
@pytest.mark.parametrize("version", FETCHES)
def test_fast_fetch_decoding_equals_that_of_the_schemas(version: int) -> None:
    usual = body_of(k.FETCH, version, fetch_body(1))
    assert fast_codecs.read_fetch(usual, 0) == plain_body(k.FETCH, version, usual)
    assert fast_codecs.read_fetch(b"xx" + usual + b"more", 2) == plain_body(k.FETCH, version, usual)
    for unusual in (
        fetch_body(2),
        fetch_body(0),
        fetch_body(1, 2),
        fetch_body(1, 0),
        fetch_body(1, rack_id="here"),
        fetch_body(1, cluster_id="us"),
        fetch_body(1, forgotten_topics=[{"topic_id": OTHER, "partitions": [1]}]),
    ):
        assert fast_codecs.read_fetch(body_of(k.FETCH, version, unusual), 0) is None


@pytest.mark.spec("B1")
def test_fast_produce_decoding_equals_that_of_the_schemas() -> None:
    version = fast_codecs.PRODUCE_VERSION
    for name, records in product(("o", "orders", "o" * 126), (b"", b"r", b"r" * 126, b"r" * 127, b"r" * 70_000)):
        usual = body_of(k.PRODUCE, version, produce_body(name, records))
        assert fast_codecs.read_produce(usual, 0) == plain_body(k.PRODUCE, version, usual)
        assert fast_codecs.read_produce(b"xx" + usual + b"more", 2) == plain_body(k.PRODUCE, version, usual)
    two = produce_body()["topics"] * 2
    apart = [{"name": "a", "partitions": [{"index": at, "records": b"r"} for at in range(2)]}]
    for unusual in (
        produce_body("o" * 127),
        produce_body("größe"),
        produce_body(records=None),
        produce_body(transactional_id="t"),
        produce_body(transactional_id=""),
        produce_body(topics=two),
        produce_body(topics=[]),
        produce_body(topics=apart),
    ):
        assert fast_codecs.read_produce(body_of(k.PRODUCE, version, unusual), 0) is None


@pytest.mark.spec("B1")
@pytest.mark.parametrize(
    ("key", "version", "raw"),
    [
        (k.PRODUCE, fast_codecs.PRODUCE_VERSION, body_of(k.PRODUCE, fast_codecs.PRODUCE_VERSION, produce_body())),
        *((k.FETCH, version, body_of(k.FETCH, version, fetch_body(1))) for version in FETCHES),
    ],
    ids=["produce", *(f"fetch-{version}" for version in FETCHES)],
)
def test_fast_decoding_of_damaged_requests_equals_that_of_the_schemas(key: int, version: int, raw: bytes) -> None:
    rng = random.Random(SEED)
    read = fast_codecs.read_fetch if key == k.FETCH else fast_codecs.read_produce
    cuts = [raw[:end] for end in range(min(len(raw), 120))]
    flips = []
    for at in range(min(len(raw), 120)):
        harmed = bytearray(raw)
        harmed[at] ^= 1 << rng.randrange(8)
        flips.append(bytes(harmed))
    for harmed_raw in cuts + flips:
        try:
            expected = plain_body(key, version, harmed_raw)
        except MalformedRequestError:
            with suppress(MalformedRequestError):
                assert read(harmed_raw, 0) is None
        else:
            assert read(harmed_raw, 0) in (None, expected)


def produced(**more: Any) -> Fields:
    response = {"index": 3, "base_offset": 1 << 40, "log_append_time_ms": -1, "log_start_offset": 9}
    return {"topics": [{"name": "orders", "partitions": [{**response, **more}]}]}


@pytest.mark.spec("B1")
def test_fast_produce_encoding_equals_that_of_the_schemas() -> None:
    version = fast_codecs.PRODUCE_VERSION
    assert fast_codecs.write_produced(produced()) == plain_answer(k.PRODUCE, version, produced())
    two = {"topics": produced()["topics"] * 2}
    many = {"topics": [{"name": "o", "partitions": produced()["topics"][0]["partitions"] * 2}]}
    long = {"topics": [{**produced()["topics"][0], "name": "o" * 127}]}
    empty: Fields = {"topics": []}
    for unusual in (produced(error_code=3, error_message="no"), two, many, long, empty):
        assert fast_codecs.write_produced(unusual) is None
    short = {"topics": [{"name": "o", "partitions": [{"index": 0, "base_offset": 5}]}]}
    assert fast_codecs.write_produced(short) is None


def fetched(**more: Any) -> Fields:
    response = {"partition": 2, "records": [b"a" * 300, b"b"], "high_watermark": 9, "last_stable_offset": 8}
    response |= {"log_start_offset": 1, **more}
    return {"topics": [{"topic": "", "topic_id": ONE, "partitions": [response]}]}


@pytest.mark.spec("B1")
@pytest.mark.parametrize("version", FETCHES)
def test_fast_fetch_encoding_equals_that_of_the_schemas(version: int) -> None:
    for body in (
        fetched(),
        fetched(records=[]),
        fetched(aborted_transactions=[]),
        fetched(aborted_transactions=None),
        {**fetched(), "session_id": 77},
    ):
        out: list[bytes] = [b"head"]
        assert fast_codecs.write_fetched(body, out)
        assert b"".join(out[1:]) == plain_answer(k.FETCH, version, body)
    empty: Fields = {"topics": []}
    for unusual in (
        fetched(error_code=1),
        fetched(records=b""),
        fetched(records=None),
        fetched(aborted_transactions=[{"producer_id": 1, "first_offset": 2}]),
        {"error_code": 70},
        empty,
        {**fetched(), "error_code": 0},
        {"topics": fetched()["topics"] * 2},
    ):
        left: list[bytes] = []
        assert not fast_codecs.write_fetched(unusual, left)
        assert not left
