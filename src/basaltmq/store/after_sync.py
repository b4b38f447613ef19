"""What happens right after a sync, in the turn of the loop that hears of it.

Stands in for a future where a group commit resolves one: a future's callbacks run a turn later, behind everything that
came in between, and publishers wait for their confirms that long.
"""

from __future__ import annotations

from collections.abc import Callable


class AfterSync:
    """Calls back with None, or with the error of the sync. The callback must not raise."""

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[[BaseException | None], None]) -> None:
        self._tell = tell

    def done(self) -> bool:
        return False

    def set_result(self, _result: None) -> None:
        self._tell(None)

    def set_exception(self, error: BaseException) -> None:
        self._tell(error)
