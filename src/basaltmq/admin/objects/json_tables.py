"""Conversion between JSON and AMQP tables and properties.

JSON has fewer types. A timestamp becomes a number. Bytes that are not UTF-8 become an object with base64, so that they
cannot be confused with text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

import msgspec

from basaltmq.admin.http.message import HttpError
from basaltmq.broker.message import properties
from basaltmq.broker.message.amqp_table import Table
from basaltmq.broker.message.properties import Properties
from basaltmq.decoding import converter

TEXTS: Final = (
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
NUMBERS: Final = ("delivery_mode", "priority", "timestamp")


def shown_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a table to JSON."""
    return {name: shown_value(value) for name, value in table.items()}


def shown_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime):
        return int(value.timestamp())
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(raw).decode()}
    if isinstance(value, Mapping):
        return shown_table(value)
    if isinstance(value, list | tuple):
        return [shown_value(each) for each in value]
    return str(value)


def shown_properties(raw: bytes) -> dict[str, Any]:
    """Convert the properties of a message to JSON, without absent ones."""
    parsed = properties.parse(raw)
    found = {name: getattr(parsed, name) for name in (*TEXTS, *NUMBERS) if getattr(parsed, name) is not None}
    if parsed.headers_raw is not None:
        found["headers"] = shown_table(parsed.headers)
    return found


_properties: Final = converter(Properties)


def properties_of(given: Mapping[str, Any]) -> bytes:
    """Encode properties from JSON. Raise HttpError 400 for unknown ones."""
    unknown = sorted(set(given) - {*TEXTS, *NUMBERS, "headers"})
    if unknown:
        raise HttpError(400, f"unknown property {unknown[0]!r}; use {', '.join((*TEXTS, *NUMBERS))} or headers")
    fields = {name: value for name, value in given.items() if name != "headers" and value is not None}
    if "expiration" in fields:
        fields["expiration"] = str(fields["expiration"])
    try:
        parsed = _properties(fields)
    except msgspec.ValidationError as error:
        raise HttpError(400, f"properties: {error}") from error
    headers = given.get("headers")
    if headers:
        if not isinstance(headers, dict):
            raise HttpError(400, "properties: headers must be an object")
        parsed.set_headers(table_of(headers))
    return properties.encode(parsed)


def table_of(given: Mapping[str, Any]) -> Table:
    """Convert JSON to a table."""
    return {str(name): value for name, value in given.items()}


def shown_payload(raw: bytes, encoding: str, size_bytes_max: int | None) -> tuple[str, str]:
    """Return (payload, payload_encoding): text if it is UTF-8 and `encoding` is auto, else base64."""
    cut = raw if size_bytes_max is None else raw[:size_bytes_max]
    if encoding == "auto":
        try:
            return cut.decode(), "string"
        except UnicodeDecodeError:
            pass
    return base64.b64encode(cut).decode(), "base64"


def payload_of(text: str, encoding: str) -> bytes:
    if encoding == "string":
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise HttpError(400, f"payload is not base64: {error}") from error
