"""Direct reply-to: replies go directly to the requesting channel, without a queue.

A client consumes from `amq.rabbitmq.reply-to` and publishes requests with that reply-to property. The server replaces
it with a generated name for the channel. The responder publishes to that name on the default exchange. The name cannot
be guessed and is valid as long as the channel. A reply to a closed channel is dropped, or returned if mandatory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from basaltmq.broker.message import properties

REPLY_TO: Final = "amq.rabbitmq.reply-to"
_PREFIX: Final = REPLY_TO + "."
_RAW: Final = REPLY_TO.encode()


class ReplyConsumer(Protocol):
    """A channel that receives direct replies."""

    def take_reply(self, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None: ...


class ReplyTo:
    """The channels of a server that receive direct replies, by virtual host and reply name."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token
        self._consumers: dict[tuple[str, str], ReplyConsumer] = {}

    def register(self, vhost: str, consumer: ReplyConsumer) -> str:
        """Register a channel and return its reply name."""
        name = _PREFIX + self._token()
        self._consumers[vhost, name] = consumer
        return name

    def forget(self, vhost: str, name: str) -> None:
        self._consumers.pop((vhost, name), None)

    def find(self, vhost: str, name: str) -> ReplyConsumer | None:
        return self._consumers.get((vhost, name))


def is_reply_name(name: str) -> bool:
    """Whether a routing key or queue name is a direct reply-to name."""
    return name.startswith(_PREFIX)


def rewrite(raw: bytes, name: str) -> bytes:
    """Replace the client's reply-to placeholder with the reply name; other properties stay unchanged."""
    if _RAW not in raw:
        return raw
    parsed = properties.parse(raw)
    if parsed.reply_to != REPLY_TO:
        return raw
    parsed.reply_to = name
    return properties.encode(parsed)


def wants_reply(raw: bytes) -> bool:
    """Whether the properties request a direct reply."""
    return _RAW in raw and properties.parse(raw).reply_to == REPLY_TO
