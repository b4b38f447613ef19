"""A folder below the system's temporary one, for as long as whoever made it lives.

    basalt-view-k3x9d2ab/
      LIVE                 held with flock by its process
      ...                  whatever it is for

It is removed by `remove`, when its object is collected, and when the interpreter ends. A process that is killed leaves
its folder behind; the next one that makes a folder removes every one whose LIVE nobody holds. The lock tells the living
from the dead across containers too, where process ids do not. LIVE has its name only once it is held, so a folder in
the making is never taken for one of the dead.
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
"""A folder without LIVE is in the making, which takes a moment; after an hour its maker was killed in that moment."""


class Scratch:
    """One folder. It is its maker's: a forked child that ends leaves it alone."""

    def __init__(self, kind: Kind) -> None:
        sweep()
        self.path: Final = Path(tempfile.mkdtemp(prefix=f"basalt-{kind}-"))
        self._end: Final = weakref.finalize(self, _remove, self.path, _hold(self.path), os.getpid())

    def remove(self) -> None:
        """Remove the folder; twice does no harm."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def sweep() -> None:
    """Remove what processes of this user left behind that are gone."""
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
    """Hold LIVE. On a file system without locks nobody can, and its folders are never swept."""
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
    """Remove a folder, LIVE last: killed in the middle of it, what is left can still be told to be of the dead."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if name != LIVE:
                shutil.rmtree(f"{path}/{name}", ignore_errors=True)
                with contextlib.suppress(OSError):
                    os.unlink(f"{path}/{name}")
    shutil.rmtree(path, ignore_errors=True)
