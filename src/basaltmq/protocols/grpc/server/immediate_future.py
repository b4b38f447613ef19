"""What a call is answered with, once it is known.

A future of asyncio tells those who wait for it in a later turn of the loop, by a call of its own for each. Answers that
become known together, by one sync, would go out one turn later than they could, and behind the next sync where the loop
syncs by itself. So this one tells at once, whoever it is that waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_log: Final = logging.getLogger("basaltmq")


class Later(Generic[T]):
    """A result that one waits for. As much of a future as whoever gives the result needs."""

    __slots__ = ("_error", "_is_done", "_result", "_tell")

    def __init__(self) -> None:
        self._is_done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._tell: Callable[[Later[T]], None] | None = None

    def done(self) -> bool:
        return self._is_done

    def set_result(self, result: T) -> None:
        self._result = result
        self._over()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._over()

    def result(self) -> T:
        """What it was, or the error there was instead; only once it is done."""
        assert self._is_done, "nothing is known yet"
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def then(self, tell: Callable[[Later[T]], None]) -> None:
        """Call `tell` when it is done, at once if it is."""
        self._tell = tell
        if self._is_done:
            tell(self)

    def _over(self) -> None:
        assert not self._is_done, "it is known already"
        self._is_done = True
        if self._tell is not None:
            try:
                self._tell(self)
            except Exception:
                # Others wait for the same sync.
                _log.exception("a call could not be answered")
