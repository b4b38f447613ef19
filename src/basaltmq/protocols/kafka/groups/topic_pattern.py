"""Subscription by pattern: all topics whose whole name matches.

The syntax is RE2, as in Apache Kafka, which bounds time and memory (`broker/auth/patterns.py`).

A thread searches all topics once, because there may be a million. From then on, only changed names are matched. Names
that change during the search are matched again at its end. The read permissions are those of the member whose
heartbeat came last, as in Apache Kafka. Fetch checks permissions on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from basaltmq.broker.auth.patterns import compiled
from basaltmq.errors import InvalidArgumentError
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused


class TopicPattern:
    """One pattern of one group, and its matching topics."""

    def __init__(self, text: str, may: Callable[[str], bool]) -> None:
        """Raise Refused if RE2 rejects the pattern."""
        try:
            self.matches = compiled(text, "the subscribed pattern").is_all_of
        except InvalidArgumentError as error:
            raise Refused(e.INVALID_REGULAR_EXPRESSION, str(error)) from None
        self.text = text
        self.may = may
        self.topics: frozenset[str] | None = None
        """None until the search has finished."""
        self.is_searching = False
        self._changed: set[str] = set()

    def among(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names that match. Thread-safe."""
        matches = self.matches
        return frozenset(name for name in names if matches(name))

    def found(self, names: frozenset[str], is_there: Callable[[str], bool]) -> None:
        """Store the result of the search, and apply the changes that came during it."""
        self.topics = frozenset(name for name in names if self.may(name))
        changed, self._changed = self._changed, set()
        self.changed(changed, is_there)

    def changed(self, names: Iterable[str], is_there: Callable[[str], bool]) -> bool:
        """Apply created, changed or deleted topics. Return whether any of them matches."""
        if self.topics is None:
            self._changed.update(names)
            return False
        matching = self.among(names)
        if not matching:
            return False
        coming = frozenset(name for name in matching if is_there(name) and self.may(name))
        self.topics = self.topics - matching | coming
        return True
