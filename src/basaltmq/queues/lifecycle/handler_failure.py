"""Handler failures in workers of all kinds: error text, logging and retry backoff.

    delay before retry n   min(first * 2^(n-1), longest), times a random factor between 0.5 and 1

The delay grows so that a message that always fails does not hold up the others. The random factor spreads the retries
of messages that failed together. The queue's `attempts_max` limits the number of attempts.
"""

from __future__ import annotations

import logging
import random
import traceback
from dataclasses import dataclass, field
from typing import Final

from basaltmq.errors import InvalidArgumentError

RETRY_DELAY_MS_DEFAULT: Final = 1_000
"""Delay before the first retry: most transient causes are gone after one second."""

RETRY_DELAY_MS_MAX_DEFAULT: Final = 300_000
"""Longest delay: workers recover within five minutes after the cause is gone."""

ERROR_CHARACTERS_MAX: Final = 2_000
"""Maximum length of the exception text in the log, and of a rejection that is stored with the message."""

STORED_CHARACTERS_MAX: Final = 600
"""Maximum length of the exception text before the frames. The queue keeps 1,024 bytes of both."""

FRAMES_MAX: Final = 8
"""Frames of the traceback that are stored with the message."""

_DOUBLINGS_MAX: Final = 32

_log: Final = logging.getLogger("basaltmq")


class Reject(Exception):
    """Raised by a handler to reject a message for good, because a retry would not help."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Retry delays of failed messages."""

    first_ms: int = RETRY_DELAY_MS_DEFAULT
    longest_ms: int = RETRY_DELAY_MS_MAX_DEFAULT
    random: random.Random = field(default_factory=random.Random, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("retry_delay_ms", self.first_ms), ("retry_delay_max_ms", self.longest_ms)):
            if type(value) is not int or value < 0:
                raise InvalidArgumentError(f"{name} of a worker must be 0 or more, not {value!r:.80}")

    def delay_ms(self, attempts: int) -> int:
        """Return the delay of a message that failed `attempts` times before this failure; 0 if `first_ms` is 0."""
        longest_ms = max(self.first_ms, self.longest_ms)
        full_ms = min(self.first_ms << min(attempts, _DOUBLINGS_MAX), longest_ms)
        return round(full_ms * self.random.uniform(0.5, 1.0))


def text_of(error: BaseException) -> str:
    """Return the type and text of an exception. Does not raise, and can always be encoded."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be read"
    # Names of files may contain surrogates, which UTF-8 does not have.
    text = text[:ERROR_CHARACTERS_MAX].encode(errors="backslashreplace").decode()
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:ERROR_CHARACTERS_MAX]


def stored_text(error: BaseException) -> str:
    """Return what is stored with the message: the exception, then the frames of the handler, innermost first."""
    if isinstance(error, Reject):
        return text_of(error)
    # The first frame is the worker's call of the handler.
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)[1:]
    lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames[-FRAMES_MAX:])]
    text = "\n".join([text_of(error)[:STORED_CHARACTERS_MAX], *lines])
    return text.encode(errors="backslashreplace").decode()


def log_failure(queue: str, message_id: bytes, attempts: int, error: Exception) -> None:
    """Log a handler's exception with its traceback. A deliberate `Reject` is logged without one."""
    if isinstance(error, Reject):
        _log.warning("queue %r: handler rejected message %s: %s", queue, message_id.hex(), text_of(error))
    else:
        _log.error(
            "queue %r: handler failed on message %s, attempt %d: %s",
            queue,
            message_id.hex(),
            attempts + 1,
            text_of(error),
            exc_info=error,
        )
