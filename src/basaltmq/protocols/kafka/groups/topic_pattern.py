"""A subscription by pattern: the topics whose whole names match.

The syntax is RE2's, as in Apache Kafka, with its bounds for time and memory (see `broker.patterns`).

Topics are found once in a thread, since there may be a million; from then on names are looked at as they come and go.
Names that changed during the search are looked at again at its end. Which of them may be read is asked on behalf of the
member that spoke last, as by Apache Kafka: fetching is refused on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from basaltmq.broker.auth.patterns import compiled
from basaltmq.errors import InvalidArgumentError
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.errors import Refused


class TopicPattern:
    """One pattern of one group."""

    def __init__(self, text: str, may: Callable[[str], bool]) -> None:
        """Refused unless RE2 compiles the pattern."""
        try:
            self.matches = compiled(text, "the subscribed pattern").is_all_of
        except InvalidArgumentError as error:
            raise Refused(e.INVALID_REGULAR_EXPRESSION, str(error)) from None
        self.text = text
        self.may = may
        self.topics: frozenset[str] | None = None
        """None: they are not searched for yet."""
        self.is_searching = False
        self._changed: set[str] = set()

    def among(self, names: Iterable[str]) -> frozenset[str]:
        """Those of the names that match. It may be called in a thread."""
        matches = self.matches
        return frozenset(name for name in names if matches(name))

    def found(self, names: frozenset[str], is_there: Callable[[str], bool]) -> None:
        """The search is over."""
        self.topics = frozenset(name for name in names if self.may(name))
        changed, self._changed = self._changed, set()
        self.changed(changed, is_there)

    def changed(self, names: Iterable[str], is_there: Callable[[str], bool]) -> bool:
        """Topics came, went or changed; whether that makes a difference here."""
        if self.topics is None:
            self._changed.update(names)
            return False
        matching = self.among(names)
        if not matching:
            return False
        coming = frozenset(name for name in matching if is_there(name) and self.may(name))
        self.topics = self.topics - matching | coming
        return True
