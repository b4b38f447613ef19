"""Options and offsets of the Spark source: parsing and errors."""

from __future__ import annotations

import json

import pytest

from basaltmq.errors import InvalidArgumentError
from pyspark_basalt import offsets
from pyspark_basalt.connection import parse_location
from pyspark_basalt.offsets import EARLIEST, LATEST
from pyspark_basalt.options import parse

pytestmark = pytest.mark.spec("F1")


def test_kafka_option_names_are_case_insensitive() -> None:
    options = parse(
        {
            "path": "/data",
            "SUBSCRIBE": "orders, clicks,orders",
            "startingoffsets": '{"orders": {"0": 12, "1": -2}}',
            "endingOffsets": "latest",
            "minPartitions": "8",
            "includeHeaders": "TRUE",
            "failOnDataLoss": "false",
        }
    )
    assert options.topics == ("orders", "clicks")
    assert options.start.offsets == {"orders": {0: 12, 1: EARLIEST}}
    assert options.end.position == LATEST
    assert (options.partitions_min, options.include_headers, options.fail_on_data_loss) == (8, True, False)


def test_batch_starts_at_earliest_and_stream_at_latest() -> None:
    given = {"path": "/data", "subscribe": "orders"}
    assert parse(given).start.position == EARLIEST
    assert parse(given, is_streaming=True).start.position == LATEST


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"subscribe": "orders"}, "say where the data is"),
        ({"path": "/d"}, "exactly one of subscribe"),
        ({"path": "/d", "subscribe": "a", "assign": '{"a": [0]}'}, "subscribe and assign"),
        ({"path": "/d", "subscribe": "a", "endingOffset": "latest"}, "did you mean endingOffsets"),
        ({"path": "/d", "subscribe": " , "}, "subscribe must contain"),
        ({"path": "/d", "subscribePattern": "("}, "not a regular expression"),
        ({"path": "/d", "assign": '{"a": "0"}'}, "assign must contain partitions by topic"),
        ({"path": "/d", "subscribe": "a", "startingOffsets": "soon"}, "startingOffsets must be"),
        ({"path": "/d", "subscribe": "a", "startingOffsets": '{"a": {"0": -3}}'}, "must have partitions and offsets"),
        ({"path": "/d", "subscribe": "a", "startingOffsets": '{"a": 3}'}, "must have partitions and offsets"),
        ({"path": "/d", "subscribe": "a", "endingOffsets": "earliest"}, "cannot be earliest"),
        ({"path": "/d", "subscribe": "a", "endingOffsets": '{"a": {"0": -2}}'}, "cannot be earliest"),
        ({"path": "/d", "subscribe": "a", "startingTimestamp": "today"}, "milliseconds since 1970"),
        ({"path": "/d", "subscribe": "a", "startingTimestamp": "1", "startingOffsets": "latest"}, "give one of"),
        ({"path": "/d", "subscribe": "a", "minPartitions": "0"}, "number above 0"),
        ({"path": "/d", "subscribe": "a", "failOnDataLoss": "maybe"}, "true or false"),
        ({"path": "/d", "server": "h", "subscribe": "a"}, "path, for a directory, or server"),
        ({"path": "/d", "subscribe": "a", "password": "p"}, "password requires server"),
        ({"server": "ftp://h", "subscribe": "a"}, "address of a broker's admin API"),
        ({"server": "http://me:s3same@h", "subscribe": "a"}, "must not contain credentials"),
        ({"server": "http://h:port", "subscribe": "a"}, "address of a broker's admin API"),
        ({"server": "http://h", "subscribe": "a", "ca": "/nowhere.pem"}, "ca cannot be read"),
        ({"server": "h", "subscribe": "a", "retryTimeoutMs": "soon"}, "number of milliseconds"),
        ({"path": "/d", "subscribe": "a", "queue": "q"}, "subscribe and queue"),
        ({"path": "/d", "queue": "q", "startingOffsets": '{"q": {"0": 1}}'}, "earliest or latest"),
        ({"path": "/d", "queue": "q", "explodeEvents": "true"}, "explodeEvents is only for topics"),
        ({"path": "/d", "subscribe": "a", "commitGroup": "g"}, "commitGroup is only for streaming"),
        ({"path": "/d", "subscribe": "a", "maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is only for streaming"),
        ({"path": "/d", "subscribe": "a", "groupIdPrefix": "g"}, "commitGroup commits its progress"),
        ({"path": "/d", "subscribe": "a", "kafka.group.id": "g"}, "commitGroup commits its progress"),
        ({"path": "/d", "subscribe": "a", "kafka.bootstrap.servers": "h:9092"}, "use path, or server"),
        ({"path": "/d", "subscribe": "a", "kafka.security.protocol": "SSL"}, "a setting of Kafka clients"),
        ({"path": "/d", "subscribe": "a", "fetchOffset.numRetries": "3"}, "use retryTimeoutMs"),
        ({"path": "/d", "subscribe": "a", "startingOffsetsByTimestampStrategy": "guess"}, "error or latest"),
    ],
)
def test_invalid_options_are_refused_by_name(given: dict[str, str], reported: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reported):
        parse(given)


def test_server_options_are_parsed_and_the_password_is_hidden() -> None:
    given = {"server": "broker", "subscribe": "a", "user": "ann", "password": "s3same", "vhost": "v"}
    options = parse(given)
    login = options.location.login
    assert login is not None
    assert (login.server, login.user, login.password, login.vhost) == ("http://broker:15672", "ann", "s3same", "v")
    assert "s3same" not in f"{options!r} {options} {login!r}"
    location = parse_location({"server": "https://broker:1/base/"}, "", {"BASALT_PASSWORD": "other"})
    assert location.login is not None
    assert (location.login.server, location.login.password) == ("https://broker:1/base", "other")


@pytest.mark.parametrize(("text", "ms"), [("15m", 900_000), ("30 s", 30_000), ("500ms", 500), ("1h", 3_600_000)])
def test_max_trigger_delay_requires_a_unit(text: str, ms: int) -> None:
    given = {"path": "/d", "subscribe": "a", "minOffsetsPerTrigger": "5", "maxTriggerDelay": text}
    assert parse(given, is_streaming=True).trigger_delay_ms_max == ms
    with pytest.raises(InvalidArgumentError, match="a time such as 15m"):
        parse(given | {"maxTriggerDelay": "15"}, is_streaming=True)


def test_stream_refuses_ending_options() -> None:
    with pytest.raises(InvalidArgumentError, match="endingOffsets is only for batch queries"):
        parse({"path": "/d", "subscribe": "a", "endingOffsets": "latest"}, is_streaming=True)


def test_repeated_first_batch_keeps_its_start() -> None:
    first = offsets.initial({"orders": {0: 5}})
    end = json.loads(json.dumps(offsets.end_of(first, {"orders": {0: 9}})))
    asked_again = offsets.initial({"orders": {0: 9}})
    assert offsets.from_json(offsets.begin_of(asked_again, end)) == {"orders": {0: 5}}
    assert offsets.from_json(end) == {"orders": {0: 9}}


def test_later_batch_starts_at_the_previous_end() -> None:
    first_end = offsets.end_of(offsets.initial({"orders": {0: 5}}), {"orders": {0: 9}})
    second_end = offsets.end_of(first_end, {"orders": {0: 12}})
    assert offsets.from_json(offsets.begin_of(first_end, second_end)) == {"orders": {0: 9}}
    assert second_end == {"orders": {"0": 12}}
