"""Topics, queues and groups of a broker, over its admin API: what `StreamView` shows of a directory, and writes.

    with_topics = RemoteView(Login("http://broker:15672", "me", password))
    for batch in with_topics.records("orders", 0, 0, 10_000): ...

What a topic is and how far it goes is asked for once and kept until `refresh`. Records come as Arrow IPC streams; one
that is cut is asked for again from behind the last record that came, so a broker may be killed and started under a
reader. Writes are staged in parts and committed; the broker does a batch of a run once, however often it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.ipc

from basaltmq.decoding import converter
from basaltmq.errors import InvalidArgumentError, UnavailableError
from basaltmq.pipeline.remote_http import LONG_TIMEOUT_S, ON_THE_WAY, BrokerHttp, Login, path
from basaltmq.streams.adapter import ShardInfo
from basaltmq.streams.groups import PartitionLag
from basaltmq.streams.shards import ShardMeta
from basaltmq.streams.topics import Topic

_CUT: Final = (*ON_THE_WAY, pa.ArrowException, UnavailableError)
"""What reading a stream raises that a broker did not finish."""


class RemoteView:
    """One virtual host of a broker."""

    def __init__(self, login: Login, http: BrokerHttp | None = None) -> None:
        self.login = login
        self._http = http or BrokerHttp(login)
        self._topics: dict[str, tuple[Topic, list[ShardInfo]]] = {}

    def refresh(self) -> None:
        """Ask again from here on."""
        self._topics.clear()

    def topics(self, after: str | None = None) -> Iterator[Topic]:
        """Every topic the user may read, by name."""
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
            raise InvalidArgumentError(
                f"topic {name!r} has partitions 0 to {len(topic.shards) - 1}, and no {partition}"
            )
        return partitions[partition]

    def offset_at(self, name: str, partition: int, timestamp_ms: int) -> int:
        """The first offset whose record is of this time or later; the end if there is none."""
        where = path("topics", self.login.vhost, name, partition, "offset")
        return int(self._http.call("GET", where, query={"timestamp_ms": timestamp_ms})["offset"])

    def records(
        self, name: str, partition: int, begin: int, end: int, *, headers: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Records of a range, whatever happens to the broker meanwhile as long as it comes back."""
        where = path("topics", self.login.vhost, name, partition, "records")
        at = begin
        patience = self._http.patience()
        while at < end:
            query: dict[str, str | int] = {"offset": at, "end": end, "headers": "true" if headers else "false"}
            try:
                with self._http.request("GET", where, query=query) as response:
                    for batch in pa.ipc.open_stream(response):
                        at = batch.column("offset")[-1].as_py() + 1
                        yield batch
                        # Only here: whoever takes the batches may have taken long.
                        patience.went_well()
                return
            except _CUT as error:
                if not patience.wait():
                    raise self._http.unreachable(error) from None

    def queue_times(self, queue: str) -> tuple[int, int]:
        """When the oldest and the newest message of a queue came, in ns; (0, 0) if it is empty."""
        told = self._http.call("GET", path("queues", self.login.vhost, queue, "times"))
        return int(told["oldest_ns"]), int(told["newest_ns"])

    def messages(self, queue: str, from_ns: int, to_ns: int) -> Iterator[pa.RecordBatch]:
        """Messages of a queue by when they came, left as they are; columns as of `queues.arrow`."""
        where = path("queues", self.login.vhost, queue, "messages")
        after = ""
        patience = self._http.patience()
        while True:
            query: dict[str, str | int] = {"from_ns": from_ns, "to_ns": to_ns, "after": after}
            try:
                with self._http.request("GET", where, query=query) as response:
                    for batch in pa.ipc.open_stream(response):
                        after = batch.column("cursor")[-1].as_py().hex()
                        yield batch
                        patience.went_well()
                return
            except _CUT as error:
                if not patience.wait():
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
        """Return dead letters; how many went, and when the first one is ready, for the next call of the same redrive.

        A call whose answer was lost is made again, and tells of those that went by then only.
        """
        body = {
            "ids": [each.hex() for each in ids],
            "to": to,
            "stamp": dict(stamp),
            "rate_per_s": rate_per_s,
            "begin_ns": begin_ns,
            "before": before,
        }
        told = self._http.call("POST", path("queues", self.login.vhost, queue, "redrive"), body)
        return int(told["moved"]), int(told["begin_ns"])

    def groups(self) -> Iterator[str]:
        """Every group that has committed something."""
        after: str | None = None
        while True:
            query = {} if after is None else {"after": after}
            page = self._http.call("GET", path("groups", self.login.vhost), query=query)
            yield from page["groups"]
            after = page["next_after"]
            if after is None:
                return

    def lag(self, group: str) -> list[PartitionLag]:
        """Where a group stands, by topic and partition."""
        return _lags(self._http.call("GET", path("groups", self.login.vhost, group)))

    def commit_group(self, group: str, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """Commit where a group reads on; durable on return."""
        told = {topic: {str(number): at for number, at in of.items()} for topic, of in offsets.items()}
        self._http.call("POST", path("groups", self.login.vhost, group), {"offsets": told})

    def put_part(self, run: str, batch: int, number: int, raw: bytes) -> dict[str, Any]:
        """Stage a part (`streams.parcel`) of task `number`; what to hand to `commit_batch`."""
        name = f"part-{number:05d}-{uuid4().hex}.arrow"
        where = path("imports", self.login.vhost, run, batch, name)
        told: dict[str, Any] = self._http.call("PUT", where, raw)
        return told

    def commit_batch(self, run: str, batch: int, parts: Sequence[Mapping[str, Any]]) -> int:
        """Import a batch, once; how many records, 0 if it was done before."""
        body = {"parts": [dict(part) for part in parts]}
        where = path("imports", self.login.vhost, run, batch)
        return int(self._http.call("POST", where, body, timeout_s=LONG_TIMEOUT_S)["records"])

    def discard_batch(self, run: str, batch: int) -> None:
        """Forget what was staged of a batch."""
        self._http.call("DELETE", path("imports", self.login.vhost, run, batch))

    def forget_run(self, run: str) -> None:
        """Forget a run of which no batch can come again."""
        self._http.call("DELETE", path("imports", self.login.vhost, run))

    def _known(self, name: str) -> tuple[Topic, list[ShardInfo]]:
        found = self._topics.get(name)
        if found is None:
            told = self._http.call("GET", path("topics", self.login.vhost, name))
            topic = _topic(told)
            found = self._topics[name] = topic, [_info(topic, each) for each in told["partitions"]]
        return found


_lags: Final = converter(list[PartitionLag])
_topic_of: Final = converter(Topic)


def _topic(told: Mapping[str, Any]) -> Topic:
    return _topic_of({each: told[each] for each in ("id", "name", "config", "shards")})


def _info(topic: Topic, told: Mapping[str, Any]) -> ShardInfo:
    config = topic.config
    meta = ShardMeta(told["shard"], topic.id.bytes, told["partition"], config.engine, config.of_shard())
    end = told["end_offset"]
    return ShardInfo(meta, told["start_offset"], end, end, told["records"], told["size_bytes"])
