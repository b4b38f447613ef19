"""What a process reads from, kept open from one task to the next: views of stores, connections to brokers.

Opening a view takes some 50 ms, as long as a task takes to read ten megabytes, and Spark hands tasks nothing that
outlives them but the process. So this module keeps the process's views, a few of them; it is the one place here that
has state of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Protocol

from basaltmq.errors import BasaltError
from basaltmq.pipeline.place import DEFAULT_VHOST, store_path
from basaltmq.pipeline.remote import RemoteView
from basaltmq.pipeline.remote_http import BrokerHttp, Login
from basaltmq.store.open import open_view
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.adapter import ShardInfo
from basaltmq.streams.topics import Topic
from basaltmq.streams.view import StreamView
from pyspark_basalt.connection import Place

VIEWS_MAX: Final = 4
"""Stores a process reads at once; a view holds files open and some megabytes of memory."""


class TopicView(Protocol):
    """What plans are made from."""

    def topics(self) -> Iterator[Topic]: ...

    def topic(self, name: str) -> Topic: ...

    def info(self, name: str, partition: int) -> ShardInfo: ...

    def offset_at(self, name: str, partition: int, timestamp_ms: int) -> int: ...

    def refresh(self) -> None: ...


@lru_cache(maxsize=VIEWS_MAX)
def _opened(path: str, vhost: str) -> StreamView:
    return StreamView.open(store_path(path, vhost))


@lru_cache(maxsize=VIEWS_MAX)
def _opened_rows(path: str, vhost: str) -> RocksStore:
    return open_view(store_path(path, vhost))


@lru_cache(maxsize=VIEWS_MAX)
def _connected(login: Login, is_known: bool) -> RemoteView:
    return RemoteView(login, BrokerHttp(login, is_known=is_known))


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


def rows_of(path: str, vhost: str = DEFAULT_VHOST) -> RocksStore:
    """The rows of a store as they are at this moment."""
    rows = _opened_rows(path, vhost)
    try:
        rows.refresh()
    except BasaltError:
        _opened_rows.cache_clear()
        raise
    return rows


def remote_of(login: Login, *, in_task: bool = False, refresh: bool = False) -> RemoteView:
    """A broker's topics. A task waits for a broker longer: the driver has just spoken to it."""
    view = _connected(login, in_task)
    if refresh:
        view.refresh()
    return view


def seen_at(place: Place, *, refresh: bool = False, is_first: bool = False) -> TopicView:
    """Topics of a place, for the driver; `is_first`: a broker that does not answer soon is not waited for."""
    if place.login is None:
        return view_of(place.path, place.vhost, refresh=refresh)
    return RemoteView(place.login) if is_first else remote_of(place.login, refresh=refresh)
