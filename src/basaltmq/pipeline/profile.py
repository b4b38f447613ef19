"""Profile: what is in a topic: how much, how large, when, by which keys, and which fields its values have.

Values are taken for JSON where they parse. Their common schema is Spark's own idea of them (`schema_of_variant_agg`),
over all values or a sample of them; fields of the top level are counted one by one: how often they are there, how often
null, the least and the largest, about how many different ones. What does not parse is counted; a few are shown.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from basaltmq.errors import InvalidArgumentError

FIELDS_MAX: Final = 200
"""Fields of the top level that are looked at."""

KEYS_SHOWN: Final = 20
EXAMPLES: Final = 5
SHOWN_BYTES: Final = 80
"""Of a value that does not parse, and of the least and largest of a field."""

SIZE_BUCKETS: Final = 24
"""Powers of two: the last one holds all from 8 MiB on."""

PERCENTILES: Final = (0.5, 0.95, 0.99)


class ProfileJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at."""

    source: dict[str, str]
    """Options of the basalt source."""
    sample: float = 1.0
    """The share of records whose values are looked into."""


class Sizes(msgspec.Struct, frozen=True):
    """In bytes; None if there are none."""

    least: int | None
    mean: float | None
    p50: int | None
    p95: int | None
    p99: int | None
    largest: int | None
    total: int


class TopicProfile(msgspec.Struct, frozen=True):
    """A topic."""

    topic: str
    records: int
    partitions: int
    first: str | None
    last: str | None
    keys_null: int
    keys_distinct: int
    """About."""
    values_null: int
    """Without a value: null or empty."""
    key_bytes: Sizes
    value_bytes: Sizes
    sampled: int
    parsed: int
    """Of the sampled: JSON."""
    parse_rate: float | None
    schema: str | None
    """Of those that parse."""


class FieldProfile(msgspec.Struct, frozen=True):
    """A field of values, at their top level."""

    topic: str
    field: str
    type: str
    present: int
    null_rate: float
    """Missing or null, of the values that parse."""
    distinct: int
    """About."""
    least: str | None
    largest: str | None


class KeyCount(msgspec.Struct, frozen=True):
    """One of the keys that most records have."""

    topic: str
    key: str
    records: int


class SizeBucket(msgspec.Struct, frozen=True):
    """Records whose values have fewer bytes than `below`, and not fewer than half of that."""

    topic: str
    below: int
    records: int


class HourCount(msgspec.Struct, frozen=True):
    """Records of an hour, by their own time."""

    topic: str
    hour: str
    records: int


class Profile(msgspec.Struct, frozen=True):
    """The result."""

    topics: list[TopicProfile]
    fields: list[FieldProfile]
    keys: list[KeyCount]
    sizes: list[SizeBucket]
    hours: list[HourCount]
    unparsed: list[str]
    """Some values that do not parse, as text, cut."""
    seconds: float


def profile(spark: SparkSession, job: ProfileJob) -> Profile:
    """Look at every record once for sizes and keys, and at the sample for values."""
    if not 0 < job.sample <= 1:
        raise InvalidArgumentError(f"a sample is a share above 0 and up to 1, not {job.sample}")
    began_s = time.monotonic()
    records = spark.read.format("basalt").options(**job.source).load()
    seen = records if job.sample == 1 else records.sample(fraction=job.sample, seed=1)
    parsed = seen.select("topic", sql.try_parse_json(sql.col("value").cast("string")).alias("v"), "value").cache()
    try:
        values = {row["topic"]: row for row in _values(parsed).collect()}
        fields = [each for topic, row in sorted(values.items()) for each in _fields(parsed, topic, row)]
        unparsed = [_shown(bytes(row["value"])) for row in parsed.where(_is_bad()).limit(EXAMPLES).collect()]
    finally:
        parsed.unpersist()
    topics = [_topic(row, values.get(row["topic"])) for row in _totals(records).orderBy("topic").collect()]
    return Profile(
        topics, fields, _keys(records), _buckets(records), _hours(records), unparsed, time.monotonic() - began_s
    )


def _is_bad() -> Column:
    return sql.col("v").isNull() & (sql.octet_length("value") > 0)


def _values(parsed: DataFrame) -> DataFrame:
    return parsed.groupBy("topic").agg(
        sql.count(sql.lit(1)).alias("sampled"),
        sql.count_if(sql.octet_length("value") > 0).alias("valued"),
        sql.count("v").alias("parsed"),
        sql.schema_of_variant_agg("v").alias("schema"),
    )


def _fields(parsed: DataFrame, topic: str, row: Any) -> list[FieldProfile]:
    named = [(name, kind) for name, kind in fields_of(row["schema"] or "") if path_of(name) is not None][:FIELDS_MAX]
    if not named:
        return []
    own = parsed.where(sql.col("topic") == topic)
    sums: list[Column] = []
    for number, (name, _) in enumerate(named):
        text = sql.try_variant_get("v", path_of(name) or "$", "string")
        sums += [
            sql.count(text).alias(f"present{number}"),
            sql.approx_count_distinct(text).alias(f"distinct{number}"),
            *_ends(text, named[number][1], number),
        ]
    found = own.agg(*sums).collect()[0]
    total = row["parsed"]
    return [
        FieldProfile(
            topic,
            name,
            kind,
            found[f"present{number}"],
            1 - found[f"present{number}"] / total if total else 0.0,
            found[f"distinct{number}"],
            _cut(found[f"least{number}"]),
            _cut(found[f"largest{number}"]),
        )
        for number, (name, kind) in enumerate(named)
    ]


def _ends(text: Column, kind: str, number: int) -> list[Column]:
    """Numbers are compared as numbers."""
    is_number = kind.startswith(("BIGINT", "DECIMAL", "DOUBLE", "FLOAT"))
    value = text.cast("double") if is_number else text
    return [sql.min(value).alias(f"least{number}"), sql.max(value).alias(f"largest{number}")]


def path_of(name: str) -> str | None:
    """The path to a field; None for a name with both quotes, which no path can say."""
    quote = '"' if "'" in name else "'"
    return None if quote in name else f"$[{quote}{name}{quote}]"


def fields_of(schema: str) -> list[tuple[str, str]]:
    """Names and types of the top level of what `schema_of_variant_agg` says: OBJECT<a: BIGINT, b: ARRAY<STRING>>."""
    if not schema.startswith("OBJECT<"):
        return []
    inner = schema[len("OBJECT<") : -1]
    found: list[tuple[str, str]] = []
    depth = begin = 0
    is_quoted = False
    for at, char in enumerate(inner + ","):
        if char == "`":
            is_quoted = not is_quoted
        elif is_quoted:
            continue
        elif char in "<(":
            depth += 1
        elif char in ">)":
            depth -= 1
        elif char == "," and depth == 0:
            name, _, kind = _halves(inner[begin:at].strip())
            if name:
                found.append((name, kind))
            begin = at + 1
    return found


def _halves(text: str) -> tuple[str, str, str]:
    if text.startswith("`"):
        end = text.index("`:", 1) if "`:" in text else len(text) - 1
        return text[1:end].replace("``", "`"), ":", text[end + 2 :].strip()
    name, colon, kind = text.partition(":")
    return name.strip(), colon, kind.strip()


def _sizes(column: str, prefix: str) -> list[Column]:
    size = sql.octet_length(column)
    return [
        sql.min(size).alias(f"{prefix}_least"),
        sql.avg(size).alias(f"{prefix}_mean"),
        sql.percentile_approx(size, list(PERCENTILES)).alias(f"{prefix}_percentiles"),
        sql.max(size).alias(f"{prefix}_largest"),
        sql.coalesce(sql.sum(size), sql.lit(0)).alias(f"{prefix}_total"),
    ]


def _totals(records: DataFrame) -> DataFrame:
    return records.groupBy("topic").agg(
        sql.count(sql.lit(1)).alias("records"),
        sql.countDistinct("partition").alias("partitions"),
        sql.date_format(sql.min("timestamp"), "yyyy-MM-dd HH:mm:ss").alias("first"),
        sql.date_format(sql.max("timestamp"), "yyyy-MM-dd HH:mm:ss").alias("last"),
        sql.count_if(sql.col("key").isNull()).alias("keys_null"),
        sql.approx_count_distinct("key").alias("keys_distinct"),
        sql.count_if(sql.col("value").isNull() | (sql.octet_length("value") == 0)).alias("values_null"),
        *_sizes("key", "key"),
        *_sizes("value", "value"),
    )


def _topic(row: Any, values: Any) -> TopicProfile:
    valued = 0 if values is None else values["valued"]
    parsed = 0 if values is None else values["parsed"]
    return TopicProfile(
        row["topic"],
        row["records"],
        row["partitions"],
        row["first"],
        row["last"],
        row["keys_null"],
        row["keys_distinct"],
        row["values_null"],
        _sizes_of(row, "key"),
        _sizes_of(row, "value"),
        0 if values is None else values["sampled"],
        parsed,
        parsed / valued if valued else None,
        values["schema"] if values is not None and parsed else None,
    )


def _sizes_of(row: Any, prefix: str) -> Sizes:
    p50, p95, p99 = row[f"{prefix}_percentiles"] or (None, None, None)
    return Sizes(
        row[f"{prefix}_least"], row[f"{prefix}_mean"], p50, p95, p99, row[f"{prefix}_largest"], row[f"{prefix}_total"]
    )


def _keys(records: DataFrame) -> list[KeyCount]:
    rows = (
        records.where(sql.col("key").isNotNull())
        .groupBy("topic", "key")
        .count()
        .orderBy(sql.col("count").desc(), "topic", "key")
        .limit(KEYS_SHOWN)
        .collect()
    )
    return [KeyCount(row["topic"], _shown(bytes(row["key"])), row["count"]) for row in rows]


def _buckets(records: DataFrame) -> list[SizeBucket]:
    size = sql.coalesce(sql.octet_length("value"), sql.lit(0))
    # The number of bits of a size: 0 for none, 7 for 64 to 127 bytes.
    bits = sql.least(sql.lit(SIZE_BUCKETS), sql.length(sql.bin(size)) - (size == 0).cast("int")).alias("bits")
    rows = records.groupBy("topic", bits).count().orderBy("topic", "bits").collect()
    return [SizeBucket(row["topic"], 1 << row["bits"], row["count"]) for row in rows]


def _hours(records: DataFrame) -> list[HourCount]:
    hour = sql.date_format("timestamp", "yyyy-MM-dd HH:00").alias("hour")
    rows = records.groupBy("topic", hour).count().orderBy("topic", "hour").collect()
    return [HourCount(row["topic"], row["hour"], row["count"]) for row in rows]


def _shown(raw: bytes) -> str:
    return _cut(raw[: SHOWN_BYTES * 4].decode("utf-8", "backslashreplace")) or ""


def _cut(value: object) -> str | None:
    if value is None:
        return None
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHOWN_BYTES else text[: SHOWN_BYTES - 1] + "…"
