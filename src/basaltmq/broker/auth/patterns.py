"""User-defined regular expressions for names, in policies, permissions and Kafka subscriptions.

The engine is RE2, whose time is linear in the length of the name for every pattern. Python's `re` backtracks: `(a+)+$`
on a name of 40 characters does not terminate in practice. RE2 has no lookaround and no backreferences, so new patterns
with them are refused.

    cost of one match    <= name bytes x program size, and PROGRAM_BYTES_MAX bounds the program

Patterns stored by earlier versions may use syntax that RE2 lacks. `stored` logs an error for such a pattern and makes
it match nothing, so that the broker can start. A permission then denies, and a policy applies to no queue.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import re2

from basaltmq.errors import InvalidArgumentError

PATTERN_BYTES_MAX: Final = 1024
"""Maximum pattern length. Names have at most 255 bytes, so longer patterns are only needed for lists of names."""

PROGRAM_BYTES_MAX: Final = 128 << 10
"""RE2's memory budget for the compiled program and its state cache. The slowest pattern found within it took 6 ms on a
name of 255 bytes; with RE2's default of 8 MiB it took 50 ms."""

_UNSUPPORTED: Final = ("(?=", "(?!", "(?<=", "(?<!", "(?>", "(?(", "(?P=")
_log: Final = logging.getLogger(__name__)


class Pattern:
    """A compiled pattern. Thread-safe."""

    __slots__ = ("_regexp", "text")

    def __init__(self, text: str, regexp: Any) -> None:
        self.text = text
        self._regexp = regexp
        """None matches nothing."""

    def is_in(self, name: str) -> bool:
        """Whether any part of the name matches, as in RabbitMQ."""
        # RE2 works on bytes. str arguments cost 6 us more per call, for offsets that are not used here.
        return self._regexp is not None and self._regexp.search(_encoded(name)) is not None

    def is_all_of(self, name: str) -> bool:
        """Whether the whole name matches, as in Kafka."""
        return self._regexp is not None and self._regexp.fullmatch(_encoded(name)) is not None


def compiled(text: str, what: str) -> Pattern:
    """Compile the pattern of a new definition. InvalidArgumentError calls it `what`."""
    if not isinstance(text, str) or len(_encoded(text)) > PATTERN_BYTES_MAX:
        raise InvalidArgumentError(f"{what} must be text of at most {PATTERN_BYTES_MAX} bytes")
    return _compiled(text, what)


def stored(text: str, what: str) -> Pattern:
    """Compile the pattern of a stored definition. An invalid one is logged and matches nothing."""
    try:
        return _compiled(text, what)
    except InvalidArgumentError as error:
        _log.error("%s; it matches nothing until it is changed", error)
        return Pattern(text, None)


def escaped(name: str) -> str:
    """Return the pattern that matches exactly this text."""
    return str(re2.escape(name))


def _compiled(text: str, what: str) -> Pattern:
    options = re2.Options()
    options.max_mem = PROGRAM_BYTES_MAX
    options.never_capture = True
    options.log_errors = False
    try:
        return Pattern(text, re2.compile(text, options))
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{what} is not Unicode text: it has half of a surrogate pair") from None
    except re2.error as error:
        raise InvalidArgumentError(f"{what}, {text!r:.80}, {_reason(text, error)}") from None


def _reason(text: str, error: Exception) -> str:
    said = error.args[0]
    reason = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    is_backreference = "escape sequence" in reason and reason[-1:].isdigit()
    if is_backreference or any(operator in text for operator in _UNSUPPORTED):
        return (
            f"uses syntax that is not supported ({reason}): lookaround, atomic groups and backreferences can take "
            "unbounded time; write a pattern without them"
        )
    if "too large" in reason or "repetition size" in reason:
        return f"is too large when compiled ({reason}); use smaller repeat counts or fewer alternatives"
    return f"is not a regular expression in RE2 syntax: {reason}"


def _encoded(name: str) -> bytes:
    return name.encode(errors="surrogatepass")
