"""Where a job looks from: beside the store, or through a broker; topics, offsets and groups are asked alike.

What to read is told in options of the basalt source (`pyspark_basalt.connection`), so that a job can hand them on as
they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from basaltmq.errors import InvalidArgumentError
from basaltmq.pipeline.place import DEFAULT_VHOST, store_path
from basaltmq.streams.adapter import ShardInfo
from basaltmq.streams.groups import PartitionLag
from basaltmq.streams.topics import Topic
from basaltmq.streams.view import StreamView

if TYPE_CHECKING:
    from basaltmq.pipeline.remote import RemoteView

PASSWORD = "BASALT_PASSWORD"  # noqa: S105 the name of a variable


class Topics(Protocol):
    """What both show."""

    def topics(self, after: str | None = None) -> Iterator[Topic]: ...

    def topic(self, name: str) -> Topic: ...

    def info(self, name: str, partition: int) -> ShardInfo: ...

    def offset_at(self, name: str, partition: int, timestamp_ms: int) -> int: ...

    def groups(self) -> Iterator[str]: ...

    def lag(self, group: str) -> list[PartitionLag]: ...

    def refresh(self) -> None: ...


@contextmanager
def looking(source: Mapping[str, str]) -> Iterator[Topics]:
    """Topics and groups of the store that options of the source mean."""
    if "server" in source:
        yield through_broker(source)
        return
    with StreamView.open(store_path(source["path"], source.get("vhost", DEFAULT_VHOST))) as view:
        yield view


def through_broker(source: Mapping[str, str]) -> RemoteView:
    """The broker that options of the source mean."""
    from basaltmq.pipeline.remote import RemoteView
    from basaltmq.pipeline.remote_http import USER, Login, check_server

    password = source.get("password") or os.environ.get(PASSWORD) or USER
    authority = Path(source["ca"]).read_text() if "ca" in source else ""
    vhost = source.get("vhost", DEFAULT_VHOST)
    return RemoteView(Login(check_server(source["server"]), source.get("user", USER), password, vhost, authority))


def offsets_of(view: Topics, names: list[str]) -> dict[tuple[str, int], tuple[int, int]]:
    """(start, end) by topic and partition."""
    return {
        (name, number): (info.start_offset, info.high_watermark)
        for name in names
        for number in range(len(view.topic(name).shards))
        for info in [view.info(name, number)]
    }


def require_path(source: Mapping[str, str], job: str) -> str:
    """The directory of the store, for a job that looks at more than records."""
    path = source.get("path")
    if path is None:
        raise InvalidArgumentError(
            f"{job} looks at the store's own files: give --data-dir, where they are, no --server"
        )
    return path
