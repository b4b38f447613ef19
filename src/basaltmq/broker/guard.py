"""Errors of the disk end a virtual host wherever they are met; everything else is the caller's.

A row or frame that cannot be read (CorruptionError) is no such error: it costs what it holds, and the caller that met
it is told (P7). If it is the store that cannot be trusted, it is poisoned, and the next call says so.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from basaltmq.errors import CorruptionError, StorageError, StoreStalledError, VHostDownError


class Failing(Protocol):
    """What can fail: a virtual host."""

    name: str

    def fail(self, error: BaseException) -> None: ...


class Guard:
    """Watches over a piece of work of a caller. A store that is behind has lost nothing: the caller hears of it."""

    __slots__ = ("_vhost",)

    def __init__(self, vhost: Failing) -> None:
        self._vhost = vhost

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StorageError) and not isinstance(error, StoreStalledError | CorruptionError):
            self._vhost.fail(error)
            raise VHostDownError(f"vhost '{self._vhost.name}' failed: {error}") from error


class QuietGuard(Guard):
    """Watches over work on nobody's behalf: a store that is behind means that it is done later."""

    __slots__ = ()

    def __exit__(  # type: ignore[override]
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, StorageError):
            return False
        if not isinstance(error, StoreStalledError):
            self._vhost.fail(error)
        return True
