"""Views of stores, kept open by a worker process from one task to the next.

Opening a view takes some 50 ms, as long as a task takes to read ten megabytes, and Spark hands tasks nothing that
outlives them but the process. So this module keeps the process's views, a few of them; it is the one place here that
has state of its own.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

from basaltmq.errors import BasaltError, NotFoundError
from basaltmq.streams.view import StreamView

VIEWS_MAX: Final = 4
"""Stores a process reads at once; a view holds files open and some megabytes of memory."""


@lru_cache(maxsize=VIEWS_MAX)
def _opened(path: str) -> StreamView:
    if not Path(path).is_dir():
        raise NotFoundError(
            f"there is no store at {path}: path is the directory given to basalt, on a disk every node sees"
        )
    return StreamView.open(path)


def view_of(path: str, *, refresh: bool = False) -> StreamView:
    """A view of the store, as fresh as its last use, or as this moment if that is asked for."""
    view = _opened(path)
    if refresh:
        try:
            view.refresh()
        except BasaltError:
            _opened.cache_clear()
            raise
    return view
