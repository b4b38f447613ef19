"""Context managers that fail a virtual host on a disk error. All other errors propagate to the caller.

An unreadable row or frame (CorruptionError) does not fail the virtual host: only its content is lost, and the caller
gets the error (P7). If the whole store is untrustworthy, it is poisoned, and the next call raises.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from basaltmq.errors import CorruptionError, StorageError, StoreStalledError, VHostDownError


class Failing(Protocol):
    """The part of a virtual host that guards use."""

    name: str

    def fail(self, error: BaseException) -> None: ...


class Guard:
    """Guards an operation of a client. StoreStalledError propagates, because nothing was written or lost."""

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
    """Guards background work: suppresses StoreStalledError, because the work is repeated, and fails on the others."""

    __slots__ = ()

    def __exit__(  # type: ignore[override]
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, StorageError):
            return False
        if not isinstance(error, StoreStalledError):
            self._vhost.fail(error)
        return True
