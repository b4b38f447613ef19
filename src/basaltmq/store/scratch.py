"""A temporary directory that is removed with its owner.

    basalt-view-k3x9d2ab/
      LIVE                 locked with flock by the owning process
      ...                  the owner's files

The directory is removed by `remove`, when its object is garbage-collected, and at interpreter exit. A killed process
leaves its directory behind; the next process that creates one removes every directory whose LIVE is not locked. The
lock identifies live owners across containers too, where process ids do not. LIVE gets its name only after it is locked,
so that an unfinished directory never looks abandoned.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

LIVE: Final = "LIVE"
MAKING: Final = "LIVE.new"

Kind: TypeAlias = Literal["index", "verify", "view"]

PREFIXES: Final = ("basalt-index-", "basalt-verify-", "basalt-view-")

UNFINISHED_S: Final = 3600.0
"""Age at which a directory without LIVE counts as abandoned. Creating LIVE takes only a moment."""


class Scratch:
    """One directory. It belongs to the creating process: a forked child that exits does not remove it."""

    def __init__(self, kind: Kind) -> None:
        sweep()
        self.path: Final = Path(tempfile.mkdtemp(prefix=f"basalt-{kind}-"))
        self._end: Final = weakref.finalize(self, _remove, self.path, _hold(self.path), os.getpid())

    def remove(self) -> None:
        """Remove the directory. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def sweep() -> None:
    """Remove the directories that dead processes of this user left behind."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIXES):
                with contextlib.suppress(OSError):
                    _sweep(entry)


def _sweep(entry: os.DirEntry[str]) -> None:
    status = entry.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid() or not entry.is_dir(follow_symlinks=False):
        return
    try:
        live = os.open(f"{entry.path}/{LIVE}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - status.st_mtime > UNFINISHED_S:
            shutil.rmtree(entry.path, ignore_errors=True)
        return
    try:
        fcntl.flock(live, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _clear(entry.path)
    finally:
        os.close(live)


def _hold(path: Path) -> int:
    """Lock LIVE. On a file system without locks it stays unlocked, and its directories are never swept."""
    try:
        live = os.open(path / MAKING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(live, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (path / MAKING).rename(path / LIVE)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return live


def _remove(path: Path, live: int, maker: int) -> None:
    if os.getpid() == maker:
        _clear(path)
    os.close(live)


def _clear(path: str | Path) -> None:
    """Remove a directory, LIVE last, so that a partly removed directory is still recognized as abandoned."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if name != LIVE:
                shutil.rmtree(f"{path}/{name}", ignore_errors=True)
                with contextlib.suppress(OSError):
                    os.unlink(f"{path}/{name}")
    shutil.rmtree(path, ignore_errors=True)
