"""Filters of subscriptions, evaluated on the server: tags (`a||b`, `*`) and SQL92 conditions.

`broker/selectors` evaluates SQL92 conditions. Properties are strings on the wire, so a property counts as a number
where it is compared with one. The names `TAGS` and `KEYS` stand for the tag and the keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from basaltmq.broker.selectors.conditions import Untyped
from basaltmq.broker.selectors.parser import Selector, parse
from basaltmq.errors import InvalidArgumentError
from basaltmq.log.batches.record import StoredRecord
from basaltmq.protocols.rocketmq.rules.messages import KEYS, RESERVED
from basaltmq.protocols.rocketmq.rules.status import Refused
from basaltmq.wire import rocketmq_wire_pb2 as wire

EXPRESSION_CHARACTERS_MAX: Final = 8_192
FILTERS_KEPT: Final = 256
"""Parsed conditions in the cache. The consumers of a group send the same one with each call."""

ALL: Final = "*"


class TagFilter:
    """Selects records that have one of some tags."""

    __slots__ = ("_tags",)

    def __init__(self, tags: frozenset[bytes]) -> None:
        self._tags = tags

    def matches(self, record: StoredRecord) -> bool:
        return any(tag in self._tags for tag in record.tags)


class SqlFilter:
    """Selects records that meet a condition on their properties."""

    __slots__ = ("_selector",)

    def __init__(self, selector: Selector) -> None:
        self._selector = selector

    def matches(self, record: StoredRecord) -> bool:
        return self._selector.accepts(lambda name: _value(record, name))


def _value(record: StoredRecord, name: str) -> Untyped | None:
    """Return a property of a record, None if it has none of this name."""
    raw: bytes | None = None
    if name == "TAGS":
        raw = record.tags[0] if record.tags else None
    elif name == "KEYS":
        raw = next((value for header, value in record.headers if header == KEYS), record.key)
    elif not name.startswith(RESERVED):
        raw = next((value for header, value in record.headers if header == name), None)
    return None if raw is None else Untyped(raw.decode(errors="replace"))


def filter_of(expression: wire.FilterExpression) -> TagFilter | SqlFilter | None:
    """Return the filter of an expression, None if it selects everything. Raise ILLEGAL_FILTER_EXPRESSION."""
    text = expression.expression
    if len(text) > EXPRESSION_CHARACTERS_MAX:
        raise Refused(
            wire.ILLEGAL_FILTER_EXPRESSION,
            f"a filter of {len(text)} characters exceeds the limit of {EXPRESSION_CHARACTERS_MAX}",
        )
    if expression.type == wire.SQL:
        return _parsed(text)
    tags = [tag.strip() for tag in text.split("||")]
    if text.strip() in ("", ALL) or ALL in tags:
        return None
    if not any(tags):
        raise Refused(wire.ILLEGAL_FILTER_EXPRESSION, f"the filter {text!r:.80} names no tag")
    return TagFilter(frozenset(tag.encode() for tag in tags if tag))


@lru_cache(maxsize=FILTERS_KEPT)
def _parsed(text: str) -> SqlFilter:
    try:
        return SqlFilter(parse(text))
    except InvalidArgumentError as error:
        raise Refused(wire.ILLEGAL_FILTER_EXPRESSION, str(error)) from error
