"""Views of stores, kept open by a worker process from one task to the next.

Opening a view takes some 50 ms, as long as a task takes to read ten megabytes, and Spark hands tasks nothing that
outlives them but the process. So this module keeps the process's views, a few of them; it is the one place here that
has state of its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.pipeline.place import DEFAULT_VHOST, store_path
from basaltmq.streams.view import StreamView

VIEWS_MAX: Final = 4
"""Stores a process reads at once; a view holds files open and some megabytes of memory."""


@lru_cache(maxsize=VIEWS_MAX)
def _opened(path: str, vhost: str) -> StreamView:
    return StreamView.open(store_path(path, vhost))


def view_of(path: str, vhost: str = DEFAULT_VHOST, *, refresh: bool = False) -> StreamView:
    """A view of the store, as fresh as its last use, or as this moment if that is asked for."""
    view = _opened(path, vhost)
    if refresh:
        try:
            view.refresh()
        except BasaltError:
            _opened.cache_clear()
            raise
    return view
