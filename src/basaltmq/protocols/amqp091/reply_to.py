"""Direct reply-to: answers go straight to the channel that asked, without a queue.

A client consumes from `amq.rabbitmq.reply-to` and publishes requests that name it in reply-to. The server puts a name
in its place that leads to the channel; whoever answers publishes to that name by the default exchange. The name
cannot be guessed, holds as long as the channel, and an answer to a channel that is gone is dropped (returned, if
mandatory).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from basaltmq.broker.message import properties

REPLY_TO: Final = "amq.rabbitmq.reply-to"
_PREFIX: Final = REPLY_TO + "."
_RAW: Final = REPLY_TO.encode()


class ReplyTaker(Protocol):
    """A channel that waits for answers."""

    def take_reply(self, exchange: str, routing_key: str, properties: bytes, body: bytes) -> None: ...


class ReplyTo:
    """The channels of a server that wait for answers, by vhost and name."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token
        self._takers: dict[tuple[str, str], ReplyTaker] = {}

    def register(self, vhost: str, taker: ReplyTaker) -> str:
        """Give a channel a name for answers."""
        name = _PREFIX + self._token()
        self._takers[vhost, name] = taker
        return name

    def forget(self, vhost: str, name: str) -> None:
        self._takers.pop((vhost, name), None)

    def find(self, vhost: str, name: str) -> ReplyTaker | None:
        return self._takers.get((vhost, name))


def is_reply_name(name: str) -> bool:
    """Whether a routing key or queue name leads to a channel."""
    return name.startswith(_PREFIX)


def rewrite(raw: bytes, name: str) -> bytes:
    """Properties with the server's name for answers in place of the client's wish; as they are without one."""
    if _RAW not in raw:
        return raw
    parsed = properties.parse(raw)
    if parsed.reply_to != REPLY_TO:
        return raw
    parsed.reply_to = name
    return properties.encode(parsed)


def wants_reply(raw: bytes) -> bool:
    """Whether a message asks for direct answers."""
    return _RAW in raw and properties.parse(raw).reply_to == REPLY_TO
