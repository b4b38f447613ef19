"""Caches the open views of stores and brokers of a process.

Opening a view takes about 50 ms, as long as a task needs to read 10 MB, and Spark keeps nothing but the process between
tasks. This cache is the only module-level state of the package.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.http_client import Login, RetryingClient
from basaltmq.pipeline.remote import RemoteView
from basaltmq.pipeline.source import Topics
from basaltmq.pipeline.store_path import DEFAULT_VHOST, store_path
from basaltmq.store.open import open_view
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.view import StreamView
from pyspark_basalt.connection import StoreLocation

VIEWS_MAX: Final = 4
"""Maximum number of cached views. A view holds open files and some megabytes of memory."""


@lru_cache(maxsize=VIEWS_MAX)
def _open_view(path: str, vhost: str) -> StreamView:
    return StreamView.open(store_path(path, vhost))


@lru_cache(maxsize=VIEWS_MAX)
def _open_rows(path: str, vhost: str) -> RocksStore:
    return open_view(store_path(path, vhost))


@lru_cache(maxsize=VIEWS_MAX)
def _connect(login: Login, is_known: bool) -> RemoteView:
    return RemoteView(login, RetryingClient(login, is_known=is_known))


def view_of(path: str, vhost: str = DEFAULT_VHOST, *, refresh: bool = False) -> StreamView:
    """Return a view of the store, optionally refreshed."""
    view = _open_view(path, vhost)
    if refresh:
        try:
            view.refresh()
        except BasaltError:
            _open_view.cache_clear()
            raise
    return view


def rows_of(path: str, vhost: str = DEFAULT_VHOST) -> RocksStore:
    """Return the rows of a store at this moment."""
    rows = _open_rows(path, vhost)
    try:
        rows.refresh()
    except BasaltError:
        _open_rows.cache_clear()
        raise
    return rows


def remote_of(login: Login, *, in_task: bool = False, refresh: bool = False) -> RemoteView:
    """Return the view of a broker. A task waits longer for it, because the driver has reached it before."""
    view = _connect(login, in_task)
    if refresh:
        view.refresh()
    return view


def topics_at(location: StoreLocation, *, refresh: bool = False, is_first: bool = False) -> Topics:
    """Return the topics of a location, for the driver. With `is_first`, an unreachable broker fails soon."""
    if location.login is None:
        return view_of(location.path, location.vhost, refresh=refresh)
    return RemoteView(location.login) if is_first else remote_of(location.login, refresh=refresh)
