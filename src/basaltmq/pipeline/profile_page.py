"""What topics hold, as a page and as rows of a table."""

from __future__ import annotations

import msgspec

from basaltmq.pipeline.page import bars, code, heading, lying_bars, page, paragraph, size, table, tiles
from basaltmq.pipeline.profile import FieldProfile, Profile, TopicProfile

KEYS_SHOWN = 12
"""Bars of the plot of keys: the most."""


def flat_topic(each: TopicProfile) -> dict[str, object]:
    """A row of a table."""
    return {
        "topic": each.topic,
        "records": each.records,
        "partitions": each.partitions,
        "first": each.first,
        "last": each.last,
        "keys": each.keys_distinct,
        "without_key": each.keys_null,
        "without_value": each.values_null,
        "value_p50": each.value_bytes.p50,
        "value_p99": each.value_bytes.p99,
        "value_max": each.value_bytes.largest,
        "bytes": each.key_bytes.total + each.value_bytes.total,
        "json": None if each.parse_rate is None else f"{each.parse_rate:.1%}",
    }


def profile_page(result: Profile) -> str:
    """The whole of it, topic by topic."""
    total = sum(each.key_bytes.total + each.value_bytes.total for each in result.topics)
    sections = [
        tiles(
            [
                ("topics", len(result.topics)),
                ("records", sum(each.records for each in result.topics)),
                ("keys and values", size(total)),
                ("first", min((each.first for each in result.topics if each.first), default="-")),
                ("last", max((each.last for each in result.topics if each.last), default="-")),
            ]
        ),
        paragraph(f"Times are UTC. Distinct counts are approximate. Looked at in {result.seconds:.1f} s."),
        table([flat_topic(each) for each in result.topics], "there are no records"),
    ]
    for topic in result.topics:
        sections += _topic(result, topic)
    if result.unparsed:
        sections += [heading("Some values that are no JSON"), *map(code, result.unparsed)]
    return page("Basalt profile", sections)


def _topic(result: Profile, topic: TopicProfile) -> list[str]:
    name = topic.topic
    hours = [each for each in result.hours if each.topic == name]
    sizes = [each for each in result.sizes if each.topic == name]
    keys = [each for each in result.keys if each.topic == name][:KEYS_SHOWN]
    fields = [each for each in result.fields if each.topic == name]
    counts = {"records": [float(each.records) for each in hours]}
    found = [heading(name), bars("By hour", [each.hour[5:] for each in hours], counts, "records an hour")]
    by_size = {"records": [float(each.records) for each in sizes]}
    found.append(bars("By size of value", [_below(each.below) for each in sizes], by_size, "records"))
    if keys:
        most = {"records": [float(each.records) for each in keys]}
        found.append(lying_bars("Keys with most records", [each.key for each in keys], most, "records"))
    if topic.schema is not None:
        said = f"{topic.parsed:,} of {topic.sampled:,} values looked at are JSON"
        found += [paragraph(said), code(topic.schema)]
    found.append(table([_field(each) for each in fields], "no fields: no value parses as a JSON object"))
    return found


def _below(limit: int) -> str:
    return "none" if limit == 1 else f"< {size(limit)}".replace(".0 ", " ")


def _field(each: FieldProfile) -> dict[str, object]:
    row: dict[str, object] = msgspec.to_builtins(each)
    del row["topic"]
    row["null_rate"] = f"{each.null_rate:.1%}"
    return row
