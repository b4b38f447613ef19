"""Dead-letter headers of RabbitMQ: `x-death`, `x-first-death-*` and `x-last-death-*` (SPEC E7).

    x-death   array of tables, the latest first, one per (queue, reason):
              count, reason, queue, time, exchange, routing-keys, original-expiration where the message had one
    x-first-death-queue, -reason, -exchange    of the first death, never changed
    x-last-death-queue, -reason, -exchange     of the latest

Reasons: expired, rejected, maxlen, delivery_limit. `time` is the time of the first death of its entry.

A message that returns to a queue where it was dead-lettered before, without a rejection in between, is in a cycle. It
is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from basaltmq.broker.message import amqp_table, properties
from basaltmq.broker.message.amqp_table import Long, Timestamp
from basaltmq.broker.message.properties import Properties

EXPIRED: Final = "expired"
REJECTED: Final = "rejected"
MAXLEN: Final = "maxlen"

DEATHS_MAX: Final = 64
"""Maximum entries of a history, one per queue and reason. The oldest are dropped."""

_HISTORY: Final = "x-death"


def routing_keys(routing_key: str, headers: dict[str, Any]) -> list[str]:
    """Return all routing keys of a message: its own, and those in CC and BCC."""
    found = [routing_key]
    for name in ("CC", "BCC"):
        more = headers.get(name)
        if isinstance(more, list):
            found += [each for each in more if isinstance(each, str)]
    return found


class Death:
    """A dead-lettered message with its updated headers."""

    __slots__ = ("deaths", "exchange", "keys", "parsed", "routing_key")

    def __init__(
        self, envelope: bytes, queue: str, reason: str, now_s: int, exchange: str, routing_key: str | None
    ) -> None:
        """`exchange` and `routing_key` are the new ones. With None, the message keeps its own keys."""
        old_exchange, old_key, raw = properties.decode_envelope(envelope)
        parsed = properties.parse(raw)
        headers = parsed.headers
        keys = routing_keys(old_key, headers)
        self.exchange = exchange
        self.parsed = parsed
        self.routing_key = old_key if routing_key is None else routing_key
        self.keys: Sequence[str] = keys if routing_key is None else [routing_key]
        self.deaths = _record(headers.get(_HISTORY), queue, reason, now_s, old_exchange, keys, parsed)
        put: dict[str, Any] = {_HISTORY: self.deaths}
        if "x-first-death-queue" not in headers:
            put |= _named("first", queue, reason, old_exchange)
        put |= _named("last", queue, reason, old_exchange)
        dropped = ["CC", "BCC"] if routing_key is not None else []
        parsed.headers_raw = amqp_table.edit(parsed.headers_raw or amqp_table.EMPTY, put, dropped)
        parsed.expiration = None

    def may_enter(self, queue: str) -> bool:
        """Whether it may enter this queue. False if that would complete a cycle."""
        for death in self.deaths:
            if death.get("reason") == REJECTED:
                return True
            if death.get("queue") == queue:
                return False
        return True

    def envelope(self) -> bytes:
        return properties.encode_envelope(self.exchange, self.routing_key, properties.encode(self.parsed))


def _named(which: str, queue: str, reason: str, exchange: str) -> dict[str, str]:
    return {
        f"x-{which}-death-queue": queue,
        f"x-{which}-death-reason": reason,
        f"x-{which}-death-exchange": exchange,
    }


def _record(
    history: object, queue: str, reason: str, now_s: int, exchange: str, keys: Sequence[str], parsed: Properties
) -> list[dict[str, Any]]:
    """Return the history with one more death. Invalid entries from a publisher are dropped."""
    deaths = [dict(each) for each in history if isinstance(each, dict)] if isinstance(history, list) else []
    found = next((each for each in deaths if each.get("queue") == queue and each.get("reason") == reason), None)
    if found is not None:
        deaths.remove(found)
        count = found.get("count")
        found["count"] = Long((count if isinstance(count, int) else 0) + 1)
    else:
        found = {
            "count": Long(1),
            "exchange": exchange,
            "queue": queue,
            "reason": reason,
            "routing-keys": list(keys),
            "time": Timestamp(now_s),
        }
        if parsed.expiration is not None:
            found["original-expiration"] = parsed.expiration
    for each in deaths:
        if isinstance(each.get("count"), int):
            each["count"] = Long(each["count"])
    return [found, *deaths[: DEATHS_MAX - 1]]
