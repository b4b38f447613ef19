"""What a handler may say about a message beyond returning or raising."""

from __future__ import annotations

from typing import Final

ERROR_CHARACTERS_MAX: Final = 2_000
"""Of an exception's text that is kept with the message."""


class Reject(Exception):
    """Raised by a handler that gives a message up: trying it again would not help."""


def text_of(error: BaseException) -> str:
    """An exception as it is kept with the message."""
    said = str(error)
    return (f"{type(error).__name__}: {said}" if said else type(error).__name__)[:ERROR_CHARACTERS_MAX]
