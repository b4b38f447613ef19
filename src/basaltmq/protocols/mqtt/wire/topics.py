"""Topic names and topic filters (section 4.7), shared subscriptions (4.8), and their keys on a topic exchange.

A topic exchange separates words with `.` and has the wildcards `*` (one word) and `#` (any number of words). MQTT
separates levels with `/` and has `+` and `#`. The keys map one to the other:

    topic name      a/b.c/*         routing key   a.b%2Ec.%2A
    topic filter    a/+/#           binding key   a.*.#

`.` and `*` are ordinary characters of MQTT, so they are escaped within levels. `%` is escaped only where it begins
something that looks like an escape, so names such as `load/100%` keep their form. Distinct names have distinct keys. A
binding key matches a routing key exactly if the filter matches the name, with one exception. A filter that begins with
a wildcard does not match names that begin with `$`, and an exchange has no such rule. `hides` detects these pairs.

A routing key may be longer than the 255 bytes that AMQP allows in a frame. The raw topic is stored with the message.
"""

from __future__ import annotations

import re
from typing import Final

from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.errors import ProtocolViolation

TOPIC_LEVELS_MAX: Final = 128
"""Levels of a name or filter. A match costs time and a subscription costs memory per level."""

SHARE_PREFIX: Final = "$share/"

EMPTY_KEY_TOPIC: Final = "%"

_TO_ESCAPE: Final = re.compile(r"%(?=2[5AE])|[.*]")
_ESCAPED: Final = re.compile(r"%2[5AE]")
_NOT_IN_NAMES: Final = re.compile("[/+#\0]")
_CODES: Final = {"%": "%25", ".": "%2E", "*": "%2A"}
_CHARACTERS: Final = {code: character for character, code in _CODES.items()}


def is_name(topic: str) -> bool:
    """Whether a string is a topic name: not empty, without wildcards and U+0000."""
    return bool(topic) and "+" not in topic and "#" not in topic and "\0" not in topic


def check_name(topic: str) -> None:
    """Raise ProtocolViolation 0x90 unless the string is a topic name that the server accepts."""
    if not topic:
        raise ProtocolViolation(rc.TOPIC_NAME_INVALID, "the topic name is empty")
    if not is_name(topic):
        raise ProtocolViolation(rc.TOPIC_NAME_INVALID, "the topic name contains a wildcard or U+0000")
    if topic.count("/") >= TOPIC_LEVELS_MAX:
        raise ProtocolViolation(rc.TOPIC_NAME_INVALID, f"the topic name has more than {TOPIC_LEVELS_MAX} levels")


def check_filter(given: str) -> None:
    """Raise ProtocolViolation 0x8F unless the string is a topic filter, with or without `$share`."""
    # Most filters have no wildcard and no share name, and are too short to have too many levels.
    is_plain = 0 < len(given) < TOPIC_LEVELS_MAX and "+" not in given and "#" not in given
    if is_plain and given[0] != "$" and "\0" not in given:
        return
    _, topic_filter = split_share(given)
    if not topic_filter:
        raise _invalid(given, "it is empty")
    if "\0" in topic_filter:
        raise _invalid(given, "it contains U+0000")
    if topic_filter.count("/") >= TOPIC_LEVELS_MAX:
        raise _invalid(given, f"it has more than {TOPIC_LEVELS_MAX} levels")
    if "#" in topic_filter and (
        topic_filter.index("#") != len(topic_filter) - 1 or (topic_filter != "#" and not topic_filter.endswith("/#"))
    ):
        raise _invalid(given, "'#' must be the last level and must be alone in it")
    if "+" in topic_filter and any("+" in level and level != "+" for level in topic_filter.split("/")):
        raise _invalid(given, "'+' must be alone in its level")


def split_share(given: str) -> tuple[str | None, str]:
    """Split a filter into (share name, topic filter). The share name is None without `$share`.

    Raise ProtocolViolation 0x8F for `$share` without a name and a filter, or with a wildcard in the name.
    """
    if not given.startswith(SHARE_PREFIX):
        if given == "$share":
            raise _invalid(given, "write $share/NAME/FILTER")
        return None, given
    name, separator, topic_filter = given[len(SHARE_PREFIX) :].partition("/")
    if not name or not separator or not topic_filter:
        raise _invalid(given, "write $share/NAME/FILTER")
    if "+" in name or "#" in name:
        raise _invalid(given, "the share name contains a wildcard")
    return name, topic_filter


def has_wildcard(topic_filter: str) -> bool:
    return "+" in topic_filter or "#" in topic_filter


def hides(topic_filter: str, topic: str) -> bool:
    """Whether a filter begins with a wildcard and the name with `$`, so that they do not match."""
    return topic[:1] == "$" and topic_filter[:1] in ("+", "#")


def routing_key(topic: str) -> str:
    """Return the routing key of a topic name."""
    if "." in topic or "*" in topic or "%2" in topic:
        topic = _TO_ESCAPE.sub(lambda found: _CODES[found[0]], topic)
    return topic.replace("/", ".")


def binding_key(topic_filter: str) -> str:
    """Return the binding key of a topic filter (without `$share`)."""
    key = routing_key(topic_filter)
    # A valid filter has '+' only as a whole level, so each one is a whole word.
    return key.replace("+", "*")


def topic_of(key: str) -> str:
    """Return the topic name of a routing key: the inverse of `routing_key`.

    AMQP publishers may use any key. Characters that a topic name cannot have are percent-encoded: `a+b` is `a%2Bb`.
    A topic name cannot be empty, so an empty key is the topic `%`, which also has one level.
    """
    if not key:
        return EMPTY_KEY_TOPIC
    topic = key if _NOT_IN_NAMES.search(key) is None else _NOT_IN_NAMES.sub(_percent, key)
    topic = topic.replace(".", "/")
    return topic if "%2" not in topic else _ESCAPED.sub(lambda found: _CHARACTERS[found[0]], topic)


def _percent(found: re.Match[str]) -> str:
    return f"%{ord(found[0]):02X}"


def _invalid(given: str, reason: str) -> ProtocolViolation:
    return ProtocolViolation(rc.TOPIC_FILTER_INVALID, f"topic filter {given[:80]!r} is invalid: {reason}")
