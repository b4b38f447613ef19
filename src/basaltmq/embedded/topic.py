"""A topic in this process: append, read, consume.

`append` returns when the records are as durable as the topic requires. `read` scans one partition by offset and changes
nothing. `consume` reads as a member of a group (see `Consumer`). Text is accepted for bytes and stored as UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import msgspec

from basaltmq.durability import Durability, parse_durability
from basaltmq.embedded.consumer import Consumer
from basaltmq.embedded.waiting import Arrivals, WaitLimit
from basaltmq.errors import InvalidArgumentError, TopicNotFoundError
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import NEVER, UNSTAMPED, Record, StoredRecord
from basaltmq.streams.adapter import READ_RECORDS, Append, IfAllOlder, ReadBatch, ShardInfo
from basaltmq.streams.groups import PartitionLag, Reset
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.topics import Topic, TopicConfig

if TYPE_CHECKING:
    import pyarrow as pa

Value: TypeAlias = bytes | str | Record
"""One record: its value, or a `Record` with all fields. Text is stored as UTF-8."""


class Position(msgspec.Struct, frozen=True):
    """Result of an append: the records have offsets `offset` to `last_offset` of a partition."""

    partition: int
    offset: int
    last_offset: int


class EmbeddedTopic:
    """One topic. Cheap to create and stateless."""

    def __init__(
        self,
        streams: StreamPlane,
        name: str,
        arrivals: Arrivals,
        clock_ms: Callable[[], int],
        admit: Callable[[], None],
    ) -> None:
        """`admit` raises an error if there is no disk space for producers."""
        self._admit = admit
        self.name = name
        self._clock_ms = clock_ms
        self._streams = streams
        self._drivers = streams.drivers
        self._arrivals = arrivals

    def __repr__(self) -> str:
        return f"<topic {self.name!r}>"

    @property
    def config(self) -> TopicConfig:
        return self._topic().config

    @property
    def partitions(self) -> int:
        return self.config.partitions

    def alter(self, **changes: Any) -> TopicConfig:
        """Change settings. The number of partitions can only grow."""
        return self._streams.topics.alter(self.name, **changes).config

    @overload
    def append(
        self,
        value: Value,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes | str] | None = None,
        tags: Sequence[bytes | str] = (),
        timestamp_ms: int = UNSTAMPED,
        expire_at_ms: int = NEVER,
        partition: int | None = None,
        durability: Durability | str | None = None,
    ) -> Position: ...

    @overload
    def append(
        self,
        value: list[Value] | tuple[Value, ...] | pa.RecordBatch | pa.Table | ColumnBatch,
        *,
        partition: int | None = None,
        durability: Durability | str | None = None,
    ) -> list[Position]: ...

    def append(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes | str] | None = None,
        tags: Sequence[bytes | str] = (),
        timestamp_ms: int = UNSTAMPED,
        expire_at_ms: int = NEVER,
        partition: int | None = None,
        durability: Durability | str | None = None,
    ) -> Position | list[Position]:
        """Append one record, several, or columns. Return their positions when they are as durable as requested.

        The partition is the given one, or the one of the key's hash, or round robin. Several records are one atomic
        append per partition. Arrow data needs a column `value`; key, headers, tags, timestamp and expire_at are
        optional.
        """
        self._admit()
        level = None if durability is None else parse_durability(durability)
        _whole("a partition", partition)
        if isinstance(value, bytes | str | bytearray | memoryview):
            value = Record(
                _raw("value", value),
                None if key is None else _raw("key", key),
                _raw_headers(headers) if headers else (),
                _raw_tags(tags) if tags else (),
                timestamp_ms,
                expire_at_ms,
            )
        elif key is not None or headers or tags or timestamp_ms != UNSTAMPED or expire_at_ms != NEVER:
            raise InvalidArgumentError(
                "key, headers, tags and times are allowed for a single value only; set them on each Record instead"
            )
        if isinstance(value, Record):
            chosen, append = self._drivers.append(self.name, value, partition=partition, durability=level)
            return self._confirm([(chosen, append)])[0]
        return self._confirm(
            [
                done
                for batch in self._columns_or_records(value)
                for done in self._drivers.append_batch(self.name, batch, partition=partition, durability=level)
            ]
        )

    def _columns_or_records(self, value: Any) -> list[Sequence[Record] | ColumnBatch]:
        """Convert the argument of `append` to batches for the engines."""
        if isinstance(value, ColumnBatch):
            return [value]
        if isinstance(value, list | tuple):
            records = [each if isinstance(each, Record) else Record(_raw("value", each)) for each in value]
            return [records] if records else []
        if not hasattr(value, "num_rows"):
            raise InvalidArgumentError(
                f"cannot append a {type(value).__name__}; give bytes, str, a Record, a list of them, or Arrow columns"
            )
        from basaltmq.log.arrow import from_arrow

        batches = value.to_batches() if hasattr(value, "to_batches") else [value]
        return [from_arrow(batch, self._clock_ms()) for batch in batches if batch.num_rows]

    def _confirm(self, appends: list[tuple[int, Append]]) -> list[Position]:
        for _, append in appends:
            self._drivers.wait(append)
        self._arrivals.wake()
        return [Position(chosen, append.base_offset, append.last_offset) for chosen, append in appends]

    def read(
        self,
        partition: int = 0,
        offset: int | None = None,
        *,
        limit: int | None = None,
        key: bytes | str | None = None,
        tag: bytes | str | None = None,
        since_ms: int | None = None,
        wait: float | None = 0,
    ) -> Iterator[StoredRecord]:
        """Yield records of a partition from an offset or a time on (default: the first record).

        `key` or `tag` selects records. Ends after `wait` seconds without a record (0: at once; None: never).
        """
        left = limit
        for batch in self._batches(partition, offset, key, tag, since_ms, wait, left):
            for record in batch.records():
                if left is not None:
                    if left <= 0:
                        return
                    left -= 1
                yield record
            if left is not None and left <= 0:
                return

    def read_arrow(
        self, partition: int = 0, offset: int | None = None, *, since_ms: int | None = None, wait: float | None = 0
    ) -> Iterator[pa.RecordBatch]:
        """Like `read`, as Arrow batches without an object per record."""
        for batch in self._batches(partition, offset, None, None, since_ms, wait, None):
            if len(batch):
                yield batch.arrow()

    def _batches(
        self,
        partition: int,
        offset: int | None,
        key: bytes | str | None,
        tag: bytes | str | None,
        since_ms: int | None,
        wait: float | None,
        limit: int | None,
    ) -> Iterator[ReadBatch]:
        for what, number in (("a partition", partition), ("an offset", offset), ("since_ms", since_ms)):
            _whole(what, number)
        if since_ms is not None and offset is not None:
            raise InvalidArgumentError("give an offset or a start time, not both")
        if key is not None and tag is not None:
            raise InvalidArgumentError("give a key or a tag, not both")
        raw_key = None if key is None else _raw("key", key)
        raw_tag = None if tag is None else _raw("tag", tag)
        wait_limit = WaitLimit(wait)
        topic = self._topic()
        if since_ms is not None:
            offset = self._drivers.offset_at(self.name, partition, since_ms, IfAllOlder.LATEST)
        if offset is None:
            offset = self.info(partition).start_offset
        most = READ_RECORDS if limit is None else max(1, min(limit, READ_RECORDS))
        while True:
            seen = self._arrivals.count
            self.require(topic)
            batch = self._read(partition, offset, raw_key, raw_tag, most)
            yield batch
            if len(batch):
                wait_limit.renew()
            moved, offset = batch.next_offset != offset, batch.next_offset
            if not moved and not self._arrivals.wait(seen, wait_limit):
                return

    def _read(self, partition: int, offset: int, key: bytes | None, tag: bytes | None, most: int) -> ReadBatch:
        if key is not None:
            return self._drivers.read_by_key(self.name, partition, key, offset, most)
        if tag is not None:
            return self._drivers.read_by_tag(self.name, partition, tag, offset, most)
        return self._drivers.read(self.name, partition, offset, most)

    def consume(
        self, group: str, *, reset: Reset | str = Reset.EARLIEST, wait: float | None = None, batch: int = 500
    ) -> Consumer:
        """Read as a member of a group. Ends after `wait` seconds without a record (0: at once; None: never)."""
        _whole("a batch", batch)
        if batch < 1:
            raise InvalidArgumentError(f"batch must be 1 or more, not {batch}")
        if not isinstance(group, str) or not group:
            raise InvalidArgumentError(f"a group must have a name, not {group!r:.80}")
        try:
            chosen = Reset(reset)
        except ValueError:
            raise InvalidArgumentError(f"unknown reset {reset!r}; use {', '.join(Reset)}") from None
        return Consumer(self, self._streams, self._arrivals, group, chosen, wait, batch)

    def info(self, partition: int = 0) -> ShardInfo:
        """Return offsets and size of a partition."""
        return self._drivers.info(self.name, partition)

    def lag(self, group: str) -> list[PartitionLag]:
        """Return the lag of a group in this topic, by partition."""
        return [each for each in self._streams.groups.lag(group) if each.topic == self.name]

    def delete_key(self, key: bytes | str) -> int:
        """Delete all records of a key. Return their number."""
        raw = _raw("key", key)
        return sum(self._drivers.delete_by_key(self.name, each, raw) for each in range(self.partitions))

    def delete_offsets(self, partition: int, offsets: Sequence[int]) -> int:
        """Delete records by offset. Return the number of those that existed."""
        return self._drivers.delete_by_offset(self.name, partition, offsets)

    def delete_before(self, partition: int, offset: int) -> int:
        """Delete all records below an offset. Return the first offset kept."""
        return self._drivers.delete_records_before(self.name, partition, offset)

    def require(self, topic: Topic) -> Topic:
        """Return the current topic. Raises TopicNotFoundError if it was deleted, even if another has its name."""
        found = self._streams.topics.find(self.name)
        if found is None or found.id != topic.id:
            raise TopicNotFoundError(f"topic {self.name!r} was deleted while it was read")
        return found

    def _topic(self) -> Topic:
        return self._streams.topics.get(self.name)


def _raw(what: str, value: object) -> bytes:
    """Return the bytes of a value, key or tag."""
    if type(value) is bytes:
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"the {what} {value!r:.80} is not valid Unicode") from error
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidArgumentError(f"a {what} must be bytes or text, not {type(value).__name__}")


def _raw_headers(headers: object) -> tuple[tuple[str, bytes], ...]:
    if not isinstance(headers, Mapping):
        raise InvalidArgumentError(f"headers must be a dict of names and values, not {type(headers).__name__}")
    return tuple((name, _raw("header", value)) for name, value in headers.items())


def _raw_tags(tags: object) -> tuple[bytes, ...]:
    if isinstance(tags, str | bytes) or not isinstance(tags, Sequence | Set):
        raise InvalidArgumentError(f"tags must be a list of bytes or texts, not {type(tags).__name__}")
    return tuple(_raw("tag", tag) for tag in tags)


def _whole(what: str, number: object) -> None:
    if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
        raise InvalidArgumentError(f"{what} must be a number, not {type(number).__name__}")
