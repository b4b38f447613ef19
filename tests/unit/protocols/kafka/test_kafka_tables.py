"""The schemas of requests and responses, compared with Apache Kafka's definitions (from kafka-python)."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from basaltmq.protocols.kafka.wire.api import APIS
from basaltmq.protocols.kafka.wire.notation import Api
from basaltmq.protocols.kafka.wire.schema import Array, Field, Struct


def _definitions() -> Path:
    # Located without an import, because the import emits a warning.
    found = importlib.util.find_spec("kafka")
    assert found is not None, "kafka-python is not installed"
    assert found.origin is not None
    return Path(found.origin).parent / "protocol" / "schemas" / "resources"


DEFINITIONS = _definitions()
ELSEWHERE = {68, 69}
"""Requests that kafka-python lacks. `test_kafka_consumer_tables` has bytes of another client."""

PUBLISHED = [api for api in APIS.values() if api.key not in ELSEWHERE]


def spans(text: str) -> tuple[int, int]:
    """Return the versions of "3+", "0-2", "4" or "none"."""
    if text == "none":
        return 1, 0
    if text.endswith("+"):
        return int(text[:-1]), 32_767
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def covers(text: str | None, version: int) -> bool:
    low, high = spans(text or "none")
    return low <= version <= high


def published(fields: list[dict[str, Any]], structs: dict[str, Any], version: int) -> list[Any]:
    """Return the wire layout of a version by Apache's definition."""
    shape: list[Any] = []
    tagged: list[Any] = []
    for field in fields:
        if not covers(field["versions"], version):
            continue
        kind = field["type"]
        element = kind.removeprefix("[]")
        inner: Any = element
        if "fields" in field or element in structs:
            inner = published(field.get("fields") or structs[element], structs, version)
        form = ("array", inner) if kind.startswith("[]") else inner
        is_null = covers(field.get("nullableVersions"), version)
        if "tag" in field and covers(field.get("taggedVersions"), version):
            tagged.append((field["tag"], form, is_null))
        else:
            shape.append((form, is_null))
    return [*shape, *sorted(tagged, key=lambda each: int(each[0]))]


def ours(table: Struct, version: int) -> list[Any]:
    shape: list[Any] = []
    tagged: list[Any] = []
    for field in table.fields:
        if not field.is_in(version):
            continue
        form = form_of(field.type, version)
        is_null = version >= field.null_since
        if field.tag >= 0:
            tagged.append((field.tag, form, is_null))
        else:
            shape.append((form, is_null))
    return [*shape, *sorted(tagged, key=lambda each: int(each[0]))]


def form_of(kind: str | Array | Struct, version: int) -> Any:
    if isinstance(kind, Array):
        return ("array", form_of(kind.of, version))
    return ours(kind, version) if isinstance(kind, Struct) else kind


def definition(name: str) -> dict[str, Any]:
    text = (DEFINITIONS / f"{name}.json").read_text()
    parsed: dict[str, Any] = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    return parsed


def strip_tagged(shape: list[Any]) -> list[Any]:
    """Remove tagged fields, which a response may omit."""
    return [(_strip(each[0]), each[1]) for each in shape if len(each) == 2]


def _strip(form: Any) -> Any:
    if isinstance(form, tuple):
        return (form[0], _strip(form[1]))
    return strip_tagged(form) if isinstance(form, list) else form


@pytest.mark.parametrize("api", PUBLISHED, ids=lambda api: api.name)
def test_every_version_has_the_published_shape(api: Api) -> None:
    for suffix, table in (("Request", api.request), ("Response", api.response)):
        known = definition(api.name + suffix)
        structs = {each["name"]: each["fields"] for each in known.get("commonStructs", [])}
        low, _ = spans(known["validVersions"])
        for version in range(max(api.version_min, low), api.version_max + 1):
            expected = strip_tagged(published(known["fields"], structs, version))
            found = strip_tagged(ours(table, version))
            if suffix == "Response":
                # A response need not use null where it is allowed.
                expected, found = loosened(expected), loosened(found)
            assert found == expected, f"{api.name}{suffix} version {version}"


def loosened(shape: list[Any]) -> list[Any]:
    def of(form: Any) -> Any:
        if isinstance(form, tuple):
            return (form[0], of(form[1]))
        return loosened(form) if isinstance(form, list) else form

    return [of(each[0]) for each in shape]


@pytest.mark.parametrize("api", PUBLISHED, ids=lambda api: api.name)
def test_flexible_versions_begin_where_published(api: Api) -> None:
    known = definition(api.name + "Request")
    assert api.key == known["apiKey"]
    for version in range(api.version_min, api.version_max + 1):
        assert (version >= api.flexible_since) == covers(known["flexibleVersions"], version)


def test_a_tagged_field_of_a_request_is_known() -> None:
    assert [field.name for field in APIS[1].request.fields if isinstance(field, Field) and field.tag == 0] == [
        "cluster_id"
    ]
