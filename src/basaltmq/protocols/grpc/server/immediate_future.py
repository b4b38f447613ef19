"""A future whose callback runs synchronously.

An asyncio future runs its callbacks in a later turn of the loop, one scheduled call per future. Responses that become
ready together, after one sync, would then be sent one turn late. Where the loop itself runs the sync, they would even
wait behind the next sync. This future runs its single callback at once, inside `set_result`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_log: Final = logging.getLogger("basaltmq")


class ImmediateFuture(Generic[T]):
    """A result that is set later, with at most one callback. Implements the part of a future that producers need."""

    __slots__ = ("_callback", "_error", "_is_done", "_result")

    def __init__(self) -> None:
        self._is_done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callback: Callable[[ImmediateFuture[T]], None] | None = None

    def done(self) -> bool:
        return self._is_done

    def set_result(self, result: T) -> None:
        self._result = result
        self._done()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._done()

    def result(self) -> T:
        """Return the result or raise the error. The future must be done."""
        assert self._is_done, "the result is not set yet"
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def then(self, callback: Callable[[ImmediateFuture[T]], None]) -> None:
        """Call `callback` when the result is set, or at once if it already is."""
        self._callback = callback
        if self._is_done:
            callback(self)

    def _done(self) -> None:
        assert not self._is_done, "the result is already set"
        self._is_done = True
        if self._callback is not None:
            try:
                self._callback(self)
            except Exception:
                # Other callers of the same sync must still get their response.
                _log.exception("sending the response of a gRPC call failed")
