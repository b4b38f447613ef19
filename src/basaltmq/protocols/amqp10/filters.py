"""Filters of a source: what they mean for a consumer.

    rabbitmq:stream-offset-spec             first, last, next, an offset, a time, or an interval: where a stream is read
    rabbitmq:stream-filter                  one or several values of the annotation x-stream-filter-value
    rabbitmq:stream-match-unfiltered        true: also messages without this annotation
    apache.org:selector-filter:string       a selector of JMS
    amqp:sql-filter                         the same conditions, with the names of RabbitMQ
    apache.org:no-local-filter:list         no messages that the same container has sent
    amqp:properties-filter                  a map: each property has this value
    amqp:application-properties-filter      a map: each application property has this value

A text in the two maps that starts with `&p:` or `&s:` is a prefix or suffix; `&&` stands for one `&`. Null accepts all
values.

A filter is a described value under any name in the filter set. The broker ignores unknown filters and omits them from
its attach, as the specification demands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from basaltmq.broker.consumers.stream_queue import OFFSET_HEADER
from basaltmq.broker.message import amqp_table
from basaltmq.broker.routing.exchange import Arguments
from basaltmq.broker.selectors.parser import Selector, parse
from basaltmq.errors import BasaltError, InvalidArgumentError
from basaltmq.protocols.amqp10.message import ORIGIN
from basaltmq.protocols.amqp10.view import MessageView
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import INVALID_FIELD, Fault, LinkFault

STREAM_OFFSET: Final = "rabbitmq:stream-offset-spec"
STREAM_FILTER: Final = "rabbitmq:stream-filter"
MATCH_UNFILTERED: Final = "rabbitmq:stream-match-unfiltered"
FILTER_VALUE: Final = "x-stream-filter-value"
"""Annotation of a message in a stream."""

SELECTORS: Final = ("apache.org:selector-filter:string", 0x0000_468C_0000_0004, "amqp:sql-filter", 0x120)
NO_LOCAL: Final = ("apache.org:no-local-filter:list", 0x0000_468C_0000_0003)
PROPERTIES: Final = ("amqp:properties-filter", 0x173)
APPLICATION_PROPERTIES: Final = ("amqp:application-properties-filter", 0x174)

FIELDS_MAX: Final = 64
_log: Final = logging.getLogger(__name__)

Accepts = Callable[[MessageView], bool]


class Filters(NamedTuple):
    """The filters of a source that are applied."""

    accepted: dict[Any, Any]
    arguments: Arguments
    """Arguments of the consumer."""
    accepts: Callable[[Any], bool] | None
    """Whether a delivery is for this consumer; None: all are."""
    is_no_local: bool


def filters_of(given: dict[Any, Any] | None, container: str) -> Filters:
    """Return the filters of a source of a link from this container."""
    accepted: dict[Any, Any] = {}
    arguments: dict[str, Any] = {}
    conditions: list[Accepts] = []
    is_no_local = matches_unfiltered = False
    stream_values: frozenset[str | None] | None = None
    for name, value in (given or {}).items():
        described = value if isinstance(value, t.Described) else t.Described(name, value)
        kind, content = described.descriptor, described.value
        if kind == STREAM_OFFSET:
            arguments[OFFSET_HEADER] = _offset(content)
        elif kind == STREAM_FILTER:
            stream_values = _stream_values(content)
        elif kind == MATCH_UNFILTERED and isinstance(content, bool):
            matches_unfiltered = content
        elif kind in SELECTORS:
            conditions.append(_selector(content))
        elif kind in NO_LOCAL:
            is_no_local = True
            conditions.append(lambda view: view.annotation(ORIGIN) != container)
        elif kind in PROPERTIES:
            conditions.append(_properties(content))
        elif kind in APPLICATION_PROPERTIES:
            conditions.append(_application_properties(content))
        else:
            continue
        accepted[name] = value
    if stream_values is not None:
        wanted = stream_values | {None} if matches_unfiltered else stream_values
        conditions.append(lambda view: _text(view.annotation(FILTER_VALUE)) in wanted)
    return Filters(accepted, arguments, _all_of(conditions) if conditions else None, is_no_local)


def _all_of(conditions: list[Accepts]) -> Callable[[Any], bool]:
    def accepts(delivery: Any) -> bool:
        try:
            view = MessageView(delivery)
            return all(condition(view) for condition in conditions)
        except (BasaltError, Fault) as error:
            _log.warning("a message has malformed properties, so only consumers without filters receive it: %s", error)
            return False

    return accepts


def _selector(text: Any) -> Accepts:
    if not isinstance(text, str):
        raise LinkFault(INVALID_FIELD, f"a selector must be a string, not {text!r:.80}")
    try:
        selector: Selector = parse(text)
    except InvalidArgumentError as error:
        raise LinkFault(INVALID_FIELD, str(error)) from None
    return lambda view: selector.accepts(view.look_up)


def _fields(content: Any, what: str) -> dict[str, Callable[[Any], bool]]:
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise LinkFault(INVALID_FIELD, f"{what} must be a map with names as keys")
    if len(content) > FIELDS_MAX:
        raise LinkFault(INVALID_FIELD, f"{what} has {len(content)} fields, at most {FIELDS_MAX}")
    return {str(name): _matcher(value) for name, value in content.items()}


def _properties(content: Any) -> Accepts:
    fields = _fields(content, PROPERTIES[0])
    for name in fields:
        if name not in s.PROPERTY_NAMES:
            raise LinkFault(INVALID_FIELD, f"{PROPERTIES[0]} has the unknown property {name!r:.80}")
    return lambda view: all(matches(view.property(name)) for name, matches in fields.items())


def _application_properties(content: Any) -> Accepts:
    fields = _fields(content, APPLICATION_PROPERTIES[0])
    return lambda view: all(
        view.has_application_property(name) and matches(view.application_property(name))
        for name, matches in fields.items()
    )


def _matcher(wanted: Any) -> Callable[[Any], bool]:
    if wanted is None:
        return lambda value: True
    if isinstance(wanted, str):
        text = str(wanted)
        if text.startswith("&p:"):
            return lambda value: isinstance(value, str) and value.startswith(text[3:])
        if text.startswith("&s:"):
            return lambda value: isinstance(value, str) and value.endswith(text[3:])
        if text.startswith("&&"):
            text = text[1:]
        elif text.startswith("&"):
            raise LinkFault(INVALID_FIELD, f"unknown modifier in the filter value {text!r:.80}")
        return lambda value: isinstance(value, str) and value == text
    is_boolean = isinstance(wanted, bool)
    return lambda value: isinstance(value, bool) == is_boolean and not isinstance(value, str) and value == wanted


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _stream_values(content: Any) -> frozenset[str | None]:
    values = content if isinstance(content, list) else [content]
    if not values or len(values) > FIELDS_MAX or not all(isinstance(each, str) for each in values):
        raise LinkFault(INVALID_FIELD, f"{STREAM_FILTER} must be one or up to {FIELDS_MAX} strings")
    return frozenset(map(str, values))


def _offset(value: Any) -> Any:
    if isinstance(value, t.Timestamp):
        return amqp_table.Timestamp(max(0, value // 1000))
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return int(value)
    raise LinkFault(INVALID_FIELD, f"invalid {STREAM_OFFSET} {value!r:.80}: use first, last, next, an offset or a time")
