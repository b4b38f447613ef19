"""Opens topics and groups for a job: from a data directory, or through a broker.

The location is given as options of the basalt source (`pyspark_basalt.connection`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from basaltmq.errors import InvalidArgumentError
from basaltmq.pipeline.store_path import DEFAULT_VHOST, store_path
from basaltmq.streams.adapter import ShardInfo
from basaltmq.streams.groups import PartitionLag
from basaltmq.streams.topics import Topic
from basaltmq.streams.view import StreamView

if TYPE_CHECKING:
    from basaltmq.pipeline.remote import RemoteView

PASSWORD = "BASALT_PASSWORD"  # noqa: S105 the name of a variable


class Topics(Protocol):
    """Interface of StreamView and RemoteView."""

    def topics(self, after: str | None = None) -> Iterator[Topic]: ...

    def topic(self, name: str) -> Topic: ...

    def info(self, name: str, partition: int) -> ShardInfo: ...

    def offset_at(self, name: str, partition: int, timestamp_ms: int) -> int: ...

    def groups(self) -> Iterator[str]: ...

    def lag(self, group: str) -> list[PartitionLag]: ...

    def refresh(self) -> None: ...


@contextmanager
def open_topics(source: Mapping[str, str]) -> Iterator[Topics]:
    """Open the topics and groups that source options select."""
    if "server" in source:
        yield remote_view(source)
        return
    with StreamView.open(store_path(source["path"], source.get("vhost", DEFAULT_VHOST))) as view:
        yield view


def remote_view(source: Mapping[str, str]) -> RemoteView:
    """Return a view of the broker that source options select."""
    from basaltmq.http_client import GUEST, Login, check_server
    from basaltmq.pipeline.remote import RemoteView

    password = source.get("password") or os.environ.get(PASSWORD) or GUEST
    authority = Path(source["ca"]).read_text() if "ca" in source else ""
    vhost = source.get("vhost", DEFAULT_VHOST)
    return RemoteView(Login(check_server(source["server"]), source.get("user", GUEST), password, vhost, authority))


def offsets_of(view: Topics, names: list[str]) -> dict[tuple[str, int], tuple[int, int]]:
    """Return (start, end) by topic and partition."""
    return {
        (name, number): (info.start_offset, info.high_watermark)
        for name in names
        for number in range(len(view.topic(name).shards))
        for info in [view.info(name, number)]
    }


def require_path(source: Mapping[str, str], job: str) -> str:
    """Return the data directory, for a job that reads the store's files."""
    path = source.get("path")
    if path is None:
        raise InvalidArgumentError(f"{job} reads the files of the store: give --data-dir instead of --server")
    return path
