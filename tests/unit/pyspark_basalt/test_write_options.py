"""Options and columns of a write are checked before the query runs."""

from __future__ import annotations

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from basaltmq.errors import InvalidArgumentError
from pyspark_basalt.connection import StoreLocation
from pyspark_basalt.write_options import parse_write

pytestmark = pytest.mark.spec("F1")


TYPES: dict[str, DataType] = {
    "BINARY": BinaryType(),
    "STRING": StringType(),
    "INT": IntegerType(),
    "BIGINT": LongType(),
    "TIMESTAMP": TimestampType(),
    "HEADERS": ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}


def schema(text: str) -> StructType:
    """Return a schema of names and types without parsing by Spark."""
    return StructType([StructField(name, TYPES[kind]) for name, kind in (each.split() for each in text.split(", "))])


@pytest.mark.parametrize(
    ("options", "columns", "reported"),
    [
        ({}, "value BINARY", "say where to write to"),
        ({"path": "/x"}, "value BINARY", "the topic is missing"),
        ({"path": "/x", "topics": "a"}, "value BINARY", "did you mean topic?"),
        ({"path": "/x", "topic": "a"}, "key BINARY", "the column value is missing"),
        ({"path": "/x", "topic": "a"}, "value BINARY, price INT", "no column 'price'"),
        ({"path": "/x", "topic": "a"}, "value INT", "value must be binary or string, not int"),
        ({"path": "/x"}, "value STRING, topic INT", "topic must be string, not int"),
        ({"path": "/x", "topic": "a", "runId": "r"}, "value BINARY", "give both"),
        ({"path": "/x", "topic": "a", "runId": "r", "batchId": "-1"}, "value BINARY", "number of at least 0"),
        ({"path": "/x", "topic": "a", "runId": "once-a", "batchId": "1"}, "value BINARY", "not recorded"),
        ({"path": "/x", "topic": "a", "runId": "a/b", "batchId": "1"}, "value BINARY", "a run name has"),
    ],
)
def test_errors_name_the_invalid_option_or_column(options: dict[str, str], columns: str, reported: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reported.replace("?", r"\?")):
        parse_write(options, schema(columns), is_streaming=False)


def test_frame_from_a_read_can_be_written() -> None:
    read = (
        "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, timestampType INT, "
        "headers HEADERS"
    )
    options = parse_write({"path": "/x"}, schema(read), is_streaming=True)
    assert (options.location, options.topic) == (StoreLocation("/x", "/"), None)


def test_batch_write_is_a_new_run_unless_named() -> None:
    given = {"path": "/x", "topic": "a"}
    first, second = (parse_write(given, schema("value STRING"), is_streaming=False) for _ in range(2))
    assert first.run != second.run
    named = parse_write(given | {"RUNID": "r", "batchid": "7"}, schema("value STRING"), is_streaming=False)
    assert (named.run, named.batch) == ("r", 7)
    with pytest.raises(InvalidArgumentError, match="uses its query id"):
        parse_write(given | {"runId": "r", "batchId": "7"}, schema("value STRING"), is_streaming=True)
