"""What workers of all kinds do about a handler that raised: the text they keep, the log, and the wait before a retry.

    delay before retry n   min(first * 2^(n-1), longest), times a random share between a half and one

The wait grows so that a message that always fails does not hold up the others, and the random share keeps messages that
failed together from failing together again. How often a message is tried is the queue's `attempts_max`.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field
from typing import Final

from basaltmq.errors import InvalidArgumentError

RETRY_DELAY_MS_DEFAULT: Final = 1_000
"""Before the first retry: most of what passes by itself has passed by then."""

RETRY_DELAY_MS_MAX_DEFAULT: Final = 300_000
"""The longest wait: a cause that is gone is noticed within five minutes."""

ERROR_CHARACTERS_MAX: Final = 2_000
"""Of an exception's text that is kept with the message."""

_DOUBLINGS_MAX: Final = 32

_log: Final = logging.getLogger("basaltmq")


class Reject(Exception):
    """Raised by a handler that gives a message up: trying it again would not help."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a message waits before it is tried again."""

    first_ms: int = RETRY_DELAY_MS_DEFAULT
    longest_ms: int = RETRY_DELAY_MS_MAX_DEFAULT
    random: random.Random = field(default_factory=random.Random, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("retry_delay_ms", self.first_ms), ("retry_delay_max_ms", self.longest_ms)):
            if type(value) is not int or value < 0:
                raise InvalidArgumentError(f"{name} of a worker is 0 or more, not {value!r:.80}")

    def delay_ms(self, attempts: int) -> int:
        """The wait of a message that failed so often before this failure; 0 if `first_ms` is."""
        longest_ms = max(self.first_ms, self.longest_ms)
        full_ms = min(self.first_ms << min(attempts, _DOUBLINGS_MAX), longest_ms)
        return round(full_ms * self.random.uniform(0.5, 1.0))


def text_of(error: BaseException) -> str:
    """An exception as it is kept with the message."""
    said = str(error)
    return (f"{type(error).__name__}: {said}" if said else type(error).__name__)[:ERROR_CHARACTERS_MAX]


def log_failure(queue: str, message_id: bytes, attempts: int, error: Exception) -> None:
    """Log that a handler raised, with its traceback; one that gave the message up meant to."""
    if isinstance(error, Reject):
        _log.warning("message %s of queue %r was given up: %s", message_id.hex(), queue, text_of(error))
    else:
        _log.error(
            "the handler of queue %r failed on message %s, attempt %d: %s",
            queue,
            message_id.hex(),
            attempts + 1,
            text_of(error),
            exc_info=error,
        )
