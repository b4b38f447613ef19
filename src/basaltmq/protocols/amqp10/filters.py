"""Filters of a source, and the consumer arguments that they mean.

    rabbitmq:stream-offset-spec     first, last, next, an offset, a time, or an interval: where a stream is read

A filter is a described value under any name in the filter set. Unknown filters are ignored, and not echoed in our
attach, as the specification demands.
"""

from __future__ import annotations

from typing import Any, Final

from basaltmq.broker.consumers.stream_queue import OFFSET_HEADER
from basaltmq.broker.message import amqp_table
from basaltmq.broker.routing.exchange import Arguments
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import INVALID_FIELD, LinkFault

STREAM_OFFSET: Final = "rabbitmq:stream-offset-spec"


def arguments_of(given: dict[Any, Any] | None) -> tuple[dict[Any, Any], Arguments]:
    """Return the filters that are applied, and the arguments of the consumer."""
    accepted: dict[Any, Any] = {}
    arguments: dict[str, Any] = {}
    for name, value in (given or {}).items():
        described = value if isinstance(value, t.Described) else t.Described(name, value)
        if described.descriptor == STREAM_OFFSET:
            arguments[OFFSET_HEADER] = _offset(described.value)
            accepted[name] = value
    return accepted, arguments


def _offset(value: Any) -> Any:
    if isinstance(value, t.Timestamp):
        return amqp_table.Timestamp(max(0, value // 1000))
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return int(value)
    raise LinkFault(INVALID_FIELD, f"invalid {STREAM_OFFSET} {value!r:.80}: use first, last, next, an offset or a time")
