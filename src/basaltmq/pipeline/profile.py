"""Profile job: counts, sizes, times, keys of a topic, and the fields of its JSON values.

Values that parse as JSON are analysed. Spark infers their common schema (`schema_of_variant_agg`) from all values or a
sample. For each top-level field the job counts presence and nulls, and finds the minimum, the maximum and an
approximate number of distinct values. Values that do not parse are counted, and a few are shown.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from basaltmq.errors import InvalidArgumentError

FIELDS_MAX: Final = 200
"""Maximum number of top-level fields."""

KEYS_SHOWN: Final = 20
EXAMPLES: Final = 5
SHOWN_BYTES: Final = 80
"""Characters shown of a value that does not parse, and of minimum and maximum."""

SIZE_BUCKETS: Final = 24
"""Power-of-two buckets. The last one holds all values from 8 MiB."""

PERCENTILES: Final = (0.5, 0.95, 0.99)


class ProfileJob(msgspec.Struct, frozen=True, kw_only=True):
    source: dict[str, str]
    """Options of the basalt source."""
    sample: float = 1.0
    """Fraction of records whose values are parsed."""


class Sizes(msgspec.Struct, frozen=True):
    """Sizes in bytes; None without values."""

    least: int | None
    mean: float | None
    p50: int | None
    p95: int | None
    p99: int | None
    largest: int | None
    total: int


class TopicProfile(msgspec.Struct, frozen=True):
    topic: str
    records: int
    partitions: int
    first: str | None
    last: str | None
    keys_null: int
    keys_distinct: int
    """Approximate."""
    values_null: int
    """Null or empty."""
    key_bytes: Sizes
    value_bytes: Sizes
    sampled: int
    parsed: int
    """Sampled values that are JSON."""
    parse_rate: float | None
    schema: str | None
    """Schema of the values that parse."""


class FieldProfile(msgspec.Struct, frozen=True):
    """A top-level field."""

    topic: str
    field: str
    type: str
    present: int
    null_rate: float
    """Fraction of parsed values in which the field is missing or null."""
    distinct: int
    """Approximate."""
    least: str | None
    largest: str | None


class KeyCount(msgspec.Struct, frozen=True):
    """A key with many records."""

    topic: str
    key: str
    records: int


class SizeBucket(msgspec.Struct, frozen=True):
    """Records with a value size in [below / 2, below)."""

    topic: str
    below: int
    records: int


class HourCount(msgspec.Struct, frozen=True):
    """Records per hour, by record timestamp."""

    topic: str
    hour: str
    records: int


class Profile(msgspec.Struct, frozen=True):
    topics: list[TopicProfile]
    fields: list[FieldProfile]
    keys: list[KeyCount]
    sizes: list[SizeBucket]
    hours: list[HourCount]
    unparsed: list[str]
    """Examples of values that do not parse, as shortened text."""
    seconds: float


def profile(spark: SparkSession, job: ProfileJob) -> Profile:
    """Profile all records for sizes and keys, and the sample for values."""
    if not 0 < job.sample <= 1:
        raise InvalidArgumentError(f"the sample must be above 0 and at most 1, not {job.sample}")
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
    """Return minimum and maximum. Numbers are compared as numbers."""
    is_number = kind.startswith(("BIGINT", "DECIMAL", "DOUBLE", "FLOAT"))
    value = text.cast("double") if is_number else text
    return [sql.min(value).alias(f"least{number}"), sql.max(value).alias(f"largest{number}")]


def path_of(name: str) -> str | None:
    """Return the path of a field. None for a name with both kinds of quotes, which a path cannot express."""
    quote = '"' if "'" in name else "'"
    return None if quote in name else f"$[{quote}{name}{quote}]"


def fields_of(schema: str) -> list[tuple[str, str]]:
    """Return names and types of the top level of a schema such as OBJECT<a: BIGINT, b: ARRAY<STRING>>."""
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
            name, kind = _split_field(inner[begin:at].strip())
            if name:
                found.append((name, kind))
            begin = at + 1
    return found


def _split_field(text: str) -> tuple[str, str]:
    if text.startswith("`"):
        end = text.index("`:", 1) if "`:" in text else len(text) - 1
        return text[1:end].replace("``", "`"), text[end + 2 :].strip()
    name, _, kind = text.partition(":")
    return name.strip(), kind.strip()


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
    # Bits of a size: 0 for 0 bytes, 7 for 64 to 127 bytes.
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
