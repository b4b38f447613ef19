"""Requests that Kafka's clients never send, or only after failures."""

from __future__ import annotations

import struct
import threading
from typing import Any
from uuid import UUID

import pytest
from tests.interop.kafka.raw import RawClient, batch_of, fetched
from tests.interop.server import Broker
from tests.log_frames import encode_plain

from basaltmq.log.batches.kafka import records
from basaltmq.log.batches.record import Record
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e


@pytest.mark.parametrize("size", [0x7FFFFFFF, -1, -(1 << 31), (100 << 20) + 1])
def test_a_request_of_invalid_size_closes_the_connection(kafka: Broker, size: int) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.send(struct.pack(">i", size))
        assert client.is_closed()


@pytest.mark.parametrize("head", [(99, 0), (0, 99), (-1, 0), (1, 3)])
def test_an_unknown_request_or_version_closes_the_connection(kafka: Broker, head: tuple[int, int]) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.send(struct.pack(">ihhih", 10, *head, 1, -1))
        assert client.is_closed()


def test_an_unknown_version_of_api_versions_gets_a_response_of_version_0(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.send(struct.pack(">ihhih", 10, k.API_VERSIONS, 99, 7, -1))
        correlation_id, body = k.decode_response(k.API_VERSIONS, 0, client.frame())
        assert (correlation_id, body["error_code"]) == (7, e.UNSUPPORTED_VERSION)
        assert {each["api_key"] for each in body["api_keys"]} == set(k.APIS)
        assert client.ask(k.API_VERSIONS, 3, {})["error_code"] == 0


def test_a_fetch_waits_for_new_records_up_to_its_timeout(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client, RawClient(kafka.port("kafka")) as other:
        client.create("waited")
        client.post(k.FETCH, 12, fetched("waited", 0, max_wait_ms=30_000))
        responses: list[bytes] = []
        reader = threading.Thread(target=lambda: responses.append(client.frame()))
        reader.start()
        assert other.produce("waited", batch_of(b"one"))["base_offset"] == 0
        reader.join(20)
        assert responses, "the fetch was not woken by what came"
        found = k.decode_response(k.FETCH, 12, responses[0])[1]["topics"][0]["partitions"][0]
        assert [each.value for each in records(found["records"])] == [b"one"]
        assert (found["high_watermark"], found["error_code"]) == (1, 0)
        assert client.fetch("waited", 1, max_wait_ms=50)["records"] == b""


def test_offsets_out_of_range_return_the_available_range(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("outside")
        client.produce("outside", batch_of(b"a", b"b", b"c"))
        for offset in (4, 99, -5):
            assert client.fetch("outside", offset)["error_code"] == e.OFFSET_OUT_OF_RANGE
        assert client.fetch("nowhere", 0)["error_code"] == e.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("acks", [0, 1, -1])
def test_every_level_of_acks_appends_in_order(kafka: Broker, acks: int) -> None:
    topic = f"acks{acks}"
    with RawClient(kafka.port("kafka")) as client:
        client.create(topic)
        for number in range(20):
            body = {
                "transactional_id": None,
                "acks": acks,
                "timeout_ms": 1000,
                "topics": [{"name": topic, "partitions": [{"index": 0, "records": batch_of(b"%d" % number)}]}],
            }
            client.post(k.PRODUCE, 9, body)
        # Pipelined, not awaited one by one.
        if acks:
            responses = [client.response(k.PRODUCE, 9)["topics"][0]["partitions"][0] for _ in range(20)]
            assert [each["base_offset"] for each in responses] == list(range(20))
        found = client.fetch(topic, 0, max_wait_ms=10_000)
        offset = 0
        values: list[bytes] = []
        while len(values) < 20:
            raw = found["records"]
            while raw:
                size = 12 + struct.unpack_from(">i", raw, 8)[0]
                values += [(each.value or b"") for each in records(raw[:size]) if each.offset >= offset]
                raw = raw[size:]
            offset = len(values)
            found = client.fetch(topic, offset, max_wait_ms=10_000) if offset < 20 else found
        assert values == [b"%d" % number for number in range(20)]


def test_invalid_batches_are_refused_with_the_codes_of_kafka(kafka: Broker) -> None:
    good = batch_of(b"x" * 100)
    damaged = good[:-1] + bytes((good[-1] ^ 1,))
    old = good[:16] + b"\x01" + good[17:]
    with RawClient(kafka.port("kafka")) as client:
        client.create("refusing", max_message_bytes="1000")
        for batch, code in (
            (damaged, e.CORRUPT_MESSAGE),
            (old, e.INVALID_RECORD),
            (good[:40], e.INVALID_RECORD),
            (good + good, e.INVALID_RECORD),
            (b"", e.INVALID_RECORD),
            (batch_of(b"y" * 2000), e.MESSAGE_TOO_LARGE),
        ):
            assert client.produce("refusing", batch)["error_code"] == code
        for version in (0, 1, 2):
            response = client.produce("refusing", old, version=version)
            assert response["error_code"] == e.UNSUPPORTED_FOR_MESSAGE_FORMAT
        assert client.produce("refusing", good, acks=5)["error_code"] == e.INVALID_REQUIRED_ACKS
        assert client.produce("nowhere", good)["error_code"] == e.UNKNOWN_TOPIC_OR_PARTITION
        assert client.produce("refusing", good)["base_offset"] == 0
        huge = client.fetch("refusing", 0, max_bytes=0x7FFFFFFF)
        assert (huge["error_code"], len(huge["records"])) == (0, len(good)), "2 GiB are asked for, what is there comes"
        assert client.fetch("refusing", 0, max_bytes=-1)["error_code"] == 0


def test_sequence_numbers_of_idempotent_producers_are_checked(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("sequenced")
        asked = {"transactional_id": None, "transaction_timeout_ms": 0}
        pid = client.ask(k.INIT_PRODUCER_ID, 4, asked)["producer_id"]
        assert client.ask(k.INIT_PRODUCER_ID, 4, asked)["producer_id"] != pid
        first = batch_of(b"a", b"b", producer=(pid, 0, 0))
        assert client.produce("sequenced", first)["base_offset"] == 0
        assert client.produce("sequenced", first)["base_offset"] == 0
        assert client.produce("sequenced", batch_of(b"c", producer=(pid, 0, 2)))["base_offset"] == 2
        skipped = client.produce("sequenced", batch_of(b"e", producer=(pid, 0, 4)))
        assert skipped["error_code"] == e.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert client.produce("sequenced", batch_of(b"d", producer=(pid, 1, 0)))["base_offset"] == 3
        fenced = client.produce("sequenced", batch_of(b"f", producer=(pid, 0, 3)))
        assert fenced["error_code"] == e.INVALID_PRODUCER_EPOCH
        assert client.fetch("sequenced", 0)["high_watermark"] == 4


def test_offsets_of_deleted_records_are_skipped(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("trimmed")
        for value in (b"a", b"b", b"c"):
            client.produce("trimmed", batch_of(value))
        asked = {
            "topics": [{"name": "trimmed", "partitions": [{"partition_index": 0, "offset": 2}]}],
            "timeout_ms": 1000,
        }
        found = client.ask(k.DELETE_RECORDS, 2, asked)["topics"][0]["partitions"][0]
        assert (found["error_code"], found["low_watermark"]) == (0, 2)
        assert client.fetch("trimmed", 0)["error_code"] == e.OFFSET_OUT_OF_RANGE
        assert [each.value for each in records(client.fetch("trimmed", 2)["records"])] == [b"c"]


def wants(session: tuple[int, int], asked: dict[UUID, int], forgotten: tuple[UUID, ...] = ()) -> dict[str, Any]:
    """Return a fetch by topic ids in a session, given as an id and an epoch."""
    return {
        "max_wait_ms": 0,
        "min_bytes": 1,
        "max_bytes": 1 << 20,
        "session_id": session[0],
        "session_epoch": session[1],
        "topics": [
            {
                "topic_id": topic,
                "partitions": [{"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}],
            }
            for topic, offset in asked.items()
        ],
        "forgotten_topics": [{"topic_id": topic, "partitions": [0]} for topic in forgotten],
    }


def test_a_fetch_session_returns_only_changed_partitions(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client, RawClient(kafka.port("kafka")) as other:
        for name in ("session-a", "session-b"):
            client.create(name)
        described = client.ask(k.METADATA, 12, {"topics": [{"name": n} for n in ("session-a", "session-b")]})
        first, second = (topic["topic_id"] for topic in described["topics"])
        begun = client.ask(k.FETCH, 16, wants((0, 0), {first: 0, second: 0}))
        session = begun["session_id"]
        assert session > 0
        assert [topic["topic_id"] for topic in begun["topics"]] == [first, second]
        assert client.ask(k.FETCH, 16, wants((session, 1), {}))["topics"] == []
        client.produce("session-b", batch_of(b"one"))
        reported = client.ask(k.FETCH, 16, wants((session, 2), {}))
        assert [topic["topic_id"] for topic in reported["topics"]] == [second]
        assert [each.value for each in records(reported["topics"][0]["partitions"][0]["records"])] == [b"one"]
        assert client.ask(k.FETCH, 16, wants((session, 3), {second: 1}))["topics"] == []
        client.produce("session-a", batch_of(b"two"))
        client.produce("session-b", batch_of(b"three"))
        reported = client.ask(k.FETCH, 16, wants((session, 4), {}, (first,)))
        assert [topic["topic_id"] for topic in reported["topics"]] == [second]
        assert client.ask(k.FETCH, 16, wants((session, 4), {}))["error_code"] == e.INVALID_FETCH_SESSION_EPOCH
        assert client.ask(k.FETCH, 12, {**fetched("session-a", 0), "session_id": session, "session_epoch": 5})[
            "error_code"
        ] == (e.FETCH_SESSION_TOPIC_ID_ERROR)
        assert other.ask(k.FETCH, 16, wants((session, 5), {}))["error_code"] == e.FETCH_SESSION_ID_NOT_FOUND
        ended = client.ask(k.FETCH, 16, wants((session, -1), {first: 0}))
        assert (ended["session_id"], len(ended["topics"])) == (0, 1)
        assert client.ask(k.FETCH, 16, wants((session, 5), {}))["error_code"] == e.FETCH_SESSION_ID_NOT_FOUND


def test_a_fetch_by_the_id_of_a_deleted_topic_is_an_error(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("going")
        gone = client.ask(k.METADATA, 12, {"topics": [{"name": "going"}]})["topics"][0]["topic_id"]
        client.ask(k.FETCH, 16, wants((0, -1), {gone: 0}))
        client.ask(k.DELETE_TOPICS, 4, {"topic_names": ["going"], "timeout_ms": 10_000})
        client.create("going")
        found = client.ask(k.FETCH, 16, wants((0, -1), {gone: 0}))["topics"][0]
        assert (found["topic_id"], found["partitions"][0]["error_code"]) == (gone, e.UNKNOWN_TOPIC_ID)


def at(client: RawClient, topic: str, time_ms: int, version: int = 10) -> tuple[int, int, int]:
    """Return the offset of a time, the time of its record, and the error."""
    asked = {"topics": [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": time_ms}]}]}
    found = client.ask(k.LIST_OFFSETS, version, asked)["topics"][0]["partitions"][0]
    return found["offset"], found["timestamp"], found["error_code"]


def test_offsets_are_found_by_name_and_by_timestamp(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("places")
        assert at(client, "places", -3) == (-1, -1, 0)
        for time_ms in (1000, 5000, 5000, 2000):
            client.produce("places", encode_plain([Record(b"x", timestamp_ms=time_ms)]))
        assert at(client, "places", -1) == (4, -1, 0)
        assert at(client, "places", -2) == (0, -1, 0)
        assert at(client, "places", -3) == (1, 5000, 0)
        assert at(client, "places", -4) == (0, -1, 0)
        assert at(client, "places", -5) == (-1, -1, 0)
        assert at(client, "places", 1500) == (1, 5000, 0)
        assert at(client, "places", 6000) == (-1, -1, 0)
        assert at(client, "places", -3, version=6)[2] == e.UNSUPPORTED_VERSION
        assert at(client, "places", -9)[2] == e.UNSUPPORTED_VERSION
        epochs = {"partition": 0, "leader_epoch": 0}
        for asked, expected in (
            (epochs, (0, 0, 4)),
            ({**epochs, "leader_epoch": 7}, (0, -1, -1)),
            ({**epochs, "current_leader_epoch": 1}, (e.UNKNOWN_LEADER_EPOCH, -1, -1)),
        ):
            body = {"topics": [{"topic": "places", "partitions": [asked]}]}
            reported = client.ask(k.OFFSET_FOR_LEADER_EPOCH, 4, body)["topics"][0]["partitions"][0]
            assert (reported["error_code"], reported["leader_epoch"], reported["end_offset"]) == expected


def test_log_append_time_is_set_on_every_record(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("stamped", message_timestamp_type="LogAppendTime")
        given = client.produce("stamped", batch_of(b"a", b"b"))["log_append_time_ms"]
        assert given > 1_700_000_000_000
        raw = client.fetch("stamped", 0)["records"]
        assert [each.timestamp_ms for each in records(raw)] == [given, given]
        assert at(client, "stamped", given) == (0, given, 0)
        client.create("unstamped")
        assert client.produce("unstamped", batch_of(b"a"))["log_append_time_ms"] == -1


def test_all_settings_of_a_topic_are_replaced_at_once(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("replaced", retention_ms="1000", max_message_bytes="5000")
        resource = {"resource_type": 2, "resource_name": "replaced"}

        def settings() -> dict[str, str]:
            asked = {"resources": [{**resource, "configuration_keys": None}]}
            found = client.ask(k.DESCRIBE_CONFIGS, 4, asked)["results"][0]["configs"]
            return {each["name"]: each["value"] for each in found}

        changed = {**resource, "configs": [{"name": "max.message.bytes", "value": "6000"}]}
        for trial in (True, False):
            reported = client.ask(k.ALTER_CONFIGS, 2, {"resources": [changed], "validate_only": trial})["responses"][0]
            assert reported["error_code"] == 0
            assert settings()["retention.ms"] == ("1000" if trial else "-1")
        assert settings()["max.message.bytes"] == "6000"
        wrong = {**resource, "configs": [{"name": "no.such", "value": "1"}]}
        reported = client.ask(k.ALTER_CONFIGS, 2, {"resources": [wrong]})["responses"][0]
        assert reported["error_code"] == e.INVALID_CONFIG


def test_the_cluster_is_described_and_topics_deleted_by_id(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        found = client.ask(k.DESCRIBE_CLUSTER, 1, {"endpoint_type": 1})
        assert [(each["broker_id"], each["port"]) for each in found["brokers"]] == [(1, kafka.port("kafka"))]
        client.create("by-id")
        number = client.ask(k.METADATA, 12, {"topics": [{"name": "by-id"}]})["topics"][0]["topic_id"]
        asked = {"topics": [{"name": None, "topic_id": number}], "timeout_ms": 10_000}
        reported = client.ask(k.DELETE_TOPICS, 6, asked)["responses"][0]
        assert (reported["error_code"], reported["name"], reported["topic_id"]) == (0, "by-id", number)
        assert client.ask(k.DELETE_TOPICS, 6, asked)["responses"][0]["error_code"] == e.UNKNOWN_TOPIC_ID
