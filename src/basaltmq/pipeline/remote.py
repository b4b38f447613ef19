"""Topics, queues and groups of a broker over its admin API: the remote counterpart of `StreamView`.

    view = RemoteView(Login("http://broker:15672", "me", password))
    for batch in view.records("orders", 0, 0, 10_000): ...

Topics and their offsets are cached until `refresh`. Records arrive as Arrow IPC streams. An interrupted stream is
continued after the last record received, so the broker may be killed and restarted during a read. Writes are staged in
parts and then committed. The broker applies a batch of a run once, however often it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.ipc

from basaltmq.decoding import converter
from basaltmq.errors import InvalidArgumentError, UnavailableError
from basaltmq.http_client import ARROW, CONNECTION_ERRORS, Login, RetryingClient, path
from basaltmq.streams.adapter import ShardInfo
from basaltmq.streams.groups import PartitionLag
from basaltmq.streams.shards import ShardMeta
from basaltmq.streams.topics import Topic

_INTERRUPTED: Final = (*CONNECTION_ERRORS, pa.ArrowException, UnavailableError)
"""Errors of an interrupted stream."""


class RemoteView:
    def __init__(self, login: Login, http: RetryingClient | None = None) -> None:
        self.login = login
        self._http = http or RetryingClient(login)
        self._topics: dict[str, tuple[Topic, list[ShardInfo]]] = {}

    def refresh(self) -> None:
        """Clear the cache."""
        self._topics.clear()

    def topics(self, after: str | None = None) -> Iterator[Topic]:
        """Yield every topic that the user may read, by name."""
        while True:
            query = {} if after is None else {"after": after}
            page = self._http.call("GET", path("topics", self.login.vhost), query=query)
            yield from (_topic(each) for each in page["topics"])
            after = page["next_after"]
            if after is None:
                return

    def topic(self, name: str) -> Topic:
        return self._known(name)[0]

    def info(self, name: str, partition: int) -> ShardInfo:
        topic, partitions = self._known(name)
        if not 0 <= partition < len(partitions):
            raise InvalidArgumentError(f"topic {name!r} has partitions 0 to {len(topic.shards) - 1}, not {partition}")
        return partitions[partition]

    def offset_at(self, name: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset with this timestamp or a later one, or the end offset."""
        where = path("topics", self.login.vhost, name, partition, "offset")
        return int(self._http.call("GET", where, query={"timestamp_ms": timestamp_ms})["offset"])

    def records(
        self, name: str, partition: int, begin: int, end: int, *, headers: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range. Waits for a broker that restarts."""
        where = path("topics", self.login.vhost, name, partition, "records")
        at = begin
        retries = self._http.retries()
        while at < end:
            query: dict[str, str | int] = {"offset": at, "end": end, "headers": "true" if headers else "false"}
            try:
                with self._http.stream("GET", where, query=query) as response:
                    for batch in pa.ipc.open_stream(response):
                        at = batch.column("offset")[-1].as_py() + 1
                        yield batch
                        # After the yield, because the consumer may have been slow.
                        retries.restart()
                return
            except _INTERRUPTED as error:
                if not retries.wait():
                    raise self._http.unreachable(error) from None

    def queue_times(self, queue: str) -> tuple[int, int]:
        """Return the enqueue times of the oldest and the newest message in ns, (0, 0) for an empty queue."""
        answer = self._http.call("GET", path("queues", self.login.vhost, queue, "times"))
        return int(answer["oldest_ns"]), int(answer["newest_ns"])

    def messages(self, queue: str, from_ns: int, to_ns: int) -> Iterator[pa.RecordBatch]:
        """Yield messages of a queue by enqueue time without consuming them. `queues.arrow` defines the columns."""
        where = path("queues", self.login.vhost, queue, "messages")
        after = ""
        retries = self._http.retries()
        while True:
            query: dict[str, str | int] = {"from_ns": from_ns, "to_ns": to_ns, "after": after}
            try:
                with self._http.stream("GET", where, query=query) as response:
                    for batch in pa.ipc.open_stream(response):
                        after = batch.column("cursor")[-1].as_py().hex()
                        yield batch
                        retries.restart()
                return
            except _INTERRUPTED as error:
                if not retries.wait():
                    raise self._http.unreachable(error) from None

    def redrive(
        self,
        queue: str,
        ids: Sequence[bytes],
        *,
        to: str | None,
        stamp: Mapping[str, str],
        rate_per_s: float | None = None,
        begin_ns: int = 0,
        before: int = 0,
    ) -> tuple[int, int]:
        """Redrive dead letters. Return the number moved, and the time in ns at which the first one is ready.

        The next call of the same redrive gets that time as `begin_ns`. After a lost response the call is repeated, and
        then counts only the messages that the second call moved.
        """
        body = {
            "ids": [each.hex() for each in ids],
            "to": to,
            "stamp": dict(stamp),
            "rate_per_s": rate_per_s,
            "begin_ns": begin_ns,
            "before": before,
        }
        answer = self._http.call("POST", path("queues", self.login.vhost, queue, "redrive"), body)
        return int(answer["moved"]), int(answer["begin_ns"])

    def groups(self) -> Iterator[str]:
        """Yield every group that has committed an offset."""
        after: str | None = None
        while True:
            query = {} if after is None else {"after": after}
            page = self._http.call("GET", path("groups", self.login.vhost), query=query)
            yield from page["groups"]
            after = page["next_after"]
            if after is None:
                return

    def lag(self, group: str) -> list[PartitionLag]:
        """Return the lag of a group by topic and partition."""
        return _lags(self._http.call("GET", path("groups", self.login.vhost, group)))

    def commit_group(self, group: str, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """Commit offsets of a group. They are durable on return."""
        by_topic = {topic: {str(number): at for number, at in of.items()} for topic, of in offsets.items()}
        self._http.call("POST", path("groups", self.login.vhost, group), {"offsets": by_topic})

    def put_part(self, run: str, batch: int, number: int, raw: bytes) -> dict[str, Any]:
        """Stage a part (`streams/imports/upload.py`) of task `number`. Return what `commit_batch` needs."""
        name = f"part-{number:05d}-{uuid4().hex}.arrow"
        where = path("imports", self.login.vhost, run, batch, name)
        part: dict[str, Any] = self._http.call("PUT", where, raw, content_type=ARROW)
        return part

    def commit_batch(self, run: str, batch: int, parts: Sequence[Mapping[str, Any]]) -> int:
        """Import a batch once. Return the number of records, 0 if it was imported before."""
        body = {"parts": [dict(part) for part in parts]}
        where = path("imports", self.login.vhost, run, batch)
        return int(self._http.call("POST", where, body, long=True)["records"])

    def discard_batch(self, run: str, batch: int) -> None:
        """Delete the staged parts of a batch."""
        self._http.call("DELETE", path("imports", self.login.vhost, run, batch))

    def forget_run(self, run: str) -> None:
        """Delete the state of a run whose batches cannot be repeated any more."""
        self._http.call("DELETE", path("imports", self.login.vhost, run))

    def _known(self, name: str) -> tuple[Topic, list[ShardInfo]]:
        found = self._topics.get(name)
        if found is None:
            answer = self._http.call("GET", path("topics", self.login.vhost, name))
            topic = _topic(answer)
            found = self._topics[name] = topic, [_info(topic, each) for each in answer["partitions"]]
        return found


_lags: Final = converter(list[PartitionLag])
_topic_of: Final = converter(Topic)


def _topic(answer: Mapping[str, Any]) -> Topic:
    return _topic_of({each: answer[each] for each in ("id", "name", "config", "shards")})


def _info(topic: Topic, answer: Mapping[str, Any]) -> ShardInfo:
    config = topic.config
    meta = ShardMeta(answer["shard"], topic.id.bytes, answer["partition"], config.engine, config.of_shard())
    end = answer["end_offset"]
    return ShardInfo(meta, answer["start_offset"], end, end, answer["records"], answer["size_bytes"])
