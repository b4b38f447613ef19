"""The open and closed states of the catalog's stores.

    closed ── open ──> open ── close ──> closed

Opening twice is an error, closing twice is allowed, and all other methods need an open store.
"""

from __future__ import annotations

from basaltmq.errors import StorageError, StoreClosedError


class Lifecycle:
    """Open or closed, with errors that name the store."""

    __slots__ = ("_is_open", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_open = False

    @property
    def is_open(self) -> bool:
        return self._is_open

    def open(self) -> None:
        if self._is_open:
            raise StorageError(f"the {self._name} is already open; close it first")
        self._is_open = True

    def close(self) -> bool:
        """Close. Return whether it was open."""
        was_open, self._is_open = self._is_open, False
        return was_open

    def require_open(self) -> None:
        if not self._is_open:
            raise StoreClosedError(f"the {self._name} is not open; open it first")
