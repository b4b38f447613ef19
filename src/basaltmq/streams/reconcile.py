"""Repairs the stream rows of a store after a salvage that could not read all of them.

    shard rows       restores the name row from the shard row or the topic; restores the shard row from the name row,
                     the topic, and the log or the records
    topics           restores a lost topic object under its name, with the settings of its shards; creates an empty
                     shard for a partition without one
    shard counter    raises it above every shard number found, frames of the log included: a new shard must not read
                     the bytes of a lost shard (promise P10)
    unknown shards   reports the offsets of frames of the log without a shard row, unless the shard was deleted
    record index     rebuilds the index of the `rocksdb` engine from its records
    groups           deletes committed offsets of missing topics; rebuilds the rows that list groups by topic

The log index is not rebuilt here. The salvage drops it, and the segment engine rebuilds it from the log when it opens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Final
from uuid import UUID

import msgspec

from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.record import NAME, ROOT, ConfiguredRecord, StoredValue, decode_value, encode_parent, encode_value
from basaltmq.errors import BasaltError, CorruptionError
from basaltmq.log.frame import COLUMNAR, DROP, KAFKA
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import scan
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.salvage.losses import Losses
from basaltmq.store.salvage.naming import Loss
from basaltmq.store.salvage.row_writer import RowWriter
from basaltmq.streams.engines.rocksdb.engine import TAIL, TIME_NONE, index_rows
from basaltmq.streams.engines.rocksdb.record_row import decode_row
from basaltmq.streams.shards import OFFSET_MAX, SHADOW, SHARD_FIRST, Engine, ShardMeta, runs_of
from basaltmq.streams.topics import TopicConfig, TopicState, topic_state

OFFSETS_SKIPPED: Final = 1 << 22
"""Offsets of a shard of the `rocksdb` engine that a lost WAL may have held: at most 128 MiB, at least 60 bytes each."""

_NUMBER: Final = Struct(">Q")
_INDEX_END: Final = b"\xff" * 40


@dataclass(slots=True)
class _Evidence:
    """What the log or the records show about a shard: its lane, first offset, and end offset (exclusive)."""

    lane: int = 0
    first: int = 0
    following: int = 0
    is_dropped: bool = False


@dataclass(slots=True)
class _Shards:
    """The shard rows and names found, and the highest shard number."""

    rows: dict[int, ShardMeta] = field(default_factory=dict)
    names: dict[tuple[UUID, int], int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    last: int = 0


def reconcile_streams(store: Store, losses: Losses, log: Path, now_ms: int) -> list[Loss]:
    """Repair the stream rows and return the losses. `log` is the directory of the lanes."""
    reconciliation = _Reconciliation(store, losses, log, now_ms)
    reconciliation.run()
    return reconciliation.found


def single_partition_topics(store: Store) -> set[str]:
    """Return the names of the topics that can hold the records of a stream queue."""
    names = set()
    for key, raw in store.scan(Family.CONFIGURED_OBJECTS):
        try:
            object_id = catalog_keys.decode_configured_key(key)
            value = decode_value(raw, object_id)
            if value.type == Kind.TOPIC and topic_state(value.attributes).config.partitions == 1:
                names.add(str(value.attributes.get(NAME, object_id)))
        except (BasaltError, msgspec.ValidationError):
            continue
    return names


class _Reconciliation:
    """One repair pass."""

    def __init__(self, store: Store, losses: Losses, log: Path, now_ms: int) -> None:
        self._store = store
        self._losses = losses
        self._log = log
        self._now_ms = now_ms
        self._rows = RowWriter(store)
        self._shards = _Shards()
        self._topics: dict[UUID, tuple[str, TopicState]] = {}
        self._evidence: dict[int, _Evidence] | None = None
        self.found: list[Loss] = []

    def run(self) -> None:
        if self._losses.hit(Family.SHARDS, Family.CONFIGURED_OBJECTS):
            self._read()
            self._name_shards()
            self._restore_shards()
            self._restore_topics()
            self._fill_partitions()
            self._rows.flush()
            self._copy_numbers()
            self._counter()
            self._rows.flush()
            self._report_unknown()
        if self._losses.hit(Family.STREAM_RECORDS, Family.STREAM_RECORD_INDEX, Family.SHARDS):
            self._records()
        if self._losses.hit(Family.CONSUMER_OFFSETS, Family.TOPIC_GROUPS, Family.CONFIGURED_OBJECTS):
            self._groups()
        self._rows.flush()

    def _read(self) -> None:
        for key, raw in self._store.scan(Family.CONFIGURED_OBJECTS):
            try:
                object_id = catalog_keys.decode_configured_key(key)
                self._add_topic(object_id, decode_value(raw, object_id))
            except BasaltError:
                continue
        shards = self._shards
        for key, raw in self._store.scan(Family.SHARDS):
            kind = key[:1]
            try:
                if kind == b"S":
                    number = stream_keys.decode_shard_key(key)
                    shards.rows[number] = ShardMeta.decode(number, raw)
                    shards.last = max(shards.last, number)
                elif kind == b"M":
                    number = int(_NUMBER.unpack(raw)[0])
                    shards.names[stream_keys.decode_shard_name_key(key)] = number
                    shards.last = max(shards.last, number)
                elif kind in (b"X", b"Y"):
                    number = int.from_bytes(key[1:], "big")
                    shards.last = max(shards.last, number)
                    if kind == b"X":
                        shards.deleted.add(number)
            except (BasaltError, ValueError):
                self._rows.delete(Family.SHARDS, key)

    def _add_topic(self, object_id: UUID, value: StoredValue) -> None:
        if value.type != Kind.TOPIC:
            return
        try:
            state = topic_state(value.attributes)
        except msgspec.ValidationError:
            return
        self._topics[object_id] = (str(value.attributes.get(NAME, object_id)), state)

    def _name_shards(self) -> None:
        """Restore missing name rows, from the shard row or else from the topic."""
        for number, meta in self._shards.rows.items():
            at = (meta.topic_id, meta.partition)
            if not meta.flags & SHADOW and at not in self._shards.names:
                self._name(at, number)
        given = {*self._shards.names.values(), *self._shards.rows}
        for topic_id, (_, state) in self._topics.items():
            for partition, number in enumerate(state.numbers()):
                if (topic_id, partition) not in self._shards.names and number not in given:
                    self._name((topic_id, partition), number)
                    self._shards.last = max(self._shards.last, number)

    def _name(self, at: tuple[UUID, int], number: int) -> None:
        self._shards.names[at] = number
        self._rows.put(Family.SHARDS, stream_keys.shard_name_key(*at), _NUMBER.pack(number))

    def _restore_shards(self) -> None:
        """Restore the row of each shard that has a name but no row."""
        for (topic_id, partition), number in list(self._shards.names.items()):
            if number in self._shards.rows:
                continue
            known = self._topics.get(topic_id)
            if known is None:
                del self._shards.names[topic_id, partition]
                self._rows.delete(Family.SHARDS, stream_keys.shard_name_key(topic_id, partition))
                continue
            self._add_row(number, topic_id, partition, known[1].config)
            text = f"the row of partition {partition} was lost and is restored; deleted records may reappear"
            self.found.append(_loss(f"topic {known[0]!r}", text))

    def _add_row(self, number: int, topic_id: UUID, partition: int, config: TopicConfig) -> None:
        seen = self._evidence_of(number)
        following = max(seen.following, self._committed(topic_id, partition))
        meta = ShardMeta(
            number,
            topic_id.bytes,
            partition,
            config.engine,
            config.of_shard(),
            seen.lane,
            0,
            seen.first,
            following,
            self._now_ms,
        )
        self._shards.rows[number] = meta
        self._rows.put(Family.SHARDS, stream_keys.shard_key(number), meta.encode())

    def _restore_topics(self) -> None:
        """Restore topics that have shards but no object, if the object was lost and not deleted."""
        names = {
            UUID(bytes=raw): (catalog_keys.decode_object_name_key(key)[0], catalog_keys.decode_object_name_key(key)[2])
            for key, raw in self._store.scan(Family.OBJECT_NAMES)
            if len(raw) == 16 and catalog_keys.decode_object_name_key(key)[1] == Kind.TOPIC
        }
        lost: dict[UUID, list[int]] = {}
        for (topic_id, _), number in self._shards.names.items():
            if topic_id not in self._topics:
                lost.setdefault(topic_id, []).append(number)
        for topic_id, numbers in lost.items():
            parent, name = names.get(topic_id, (ROOT, f"recovered-{topic_id}"))
            key = catalog_keys.configured_key(topic_id)
            if not self._losses.may_cover(Family.CONFIGURED_OBJECTS, key):
                continue
            if parent != ROOT:
                link = catalog_keys.hierarchy_key(topic_id, Kind.VHOST)
                self._rows.put(Family.CONFIGURED_OBJECT_HIERARCHY, link, encode_parent(parent))
            metas = [self._shards.rows[number] for number in numbers]
            config = _topic_config(metas)
            state = TopicState(config, shards=runs_of(meta.number for meta in sorted(metas, key=_partition)))
            attributes = {**msgspec.to_builtins(state), NAME: name}
            self._rows.put(
                Family.CONFIGURED_OBJECTS, key, encode_value(ConfiguredRecord(topic_id, Kind.TOPIC, attributes))
            )
            self._topics[topic_id] = (name, state)
            text = "the settings were lost and are restored from the partitions; check them"
            self.found.append(_loss(f"topic {name!r}", text, str(topic_id)))

    def _fill_partitions(self) -> None:
        """Create an empty shard for each partition without one."""
        for topic_id, (name, state) in self._topics.items():
            for partition in range(state.config.partitions):
                if (topic_id, partition) not in self._shards.names:
                    number = max(self._shards.last, *self._numbers_found(), SHARD_FIRST - 1) + 1
                    self._shards.last = number
                    self._name((topic_id, partition), number)
                    self._add_row(number, topic_id, partition, state.config)
                    text = f"the shard of partition {partition} and its records are lost; the partition is empty now"
                    self.found.append(_loss(f"topic {name!r}", text, str(topic_id)))

    def _copy_numbers(self) -> None:
        """Correct each topic's copy of its shard numbers where it differs from the shard rows."""
        for topic_id, (_, state) in self._topics.items():
            numbers = [self._shards.names[topic_id, partition] for partition in range(state.config.partitions)]
            if state.numbers() == numbers:
                continue
            key = catalog_keys.configured_key(topic_id)
            raw = self._store.get(Family.CONFIGURED_OBJECTS, key)
            assert raw is not None, "topics without an object were restored before"
            attributes = {**decode_value(raw, topic_id).attributes, "shards": runs_of(numbers)}
            self._rows.put(
                Family.CONFIGURED_OBJECTS, key, encode_value(ConfiguredRecord(topic_id, Kind.TOPIC, attributes))
            )

    def _counter(self) -> None:
        following = max(self._shards.last, *self._numbers_found(), SHARD_FIRST - 1) + 1
        raw = self._store.get(Family.SHARDS, stream_keys.SHARD_COUNTER_KEY)
        next_number = int.from_bytes(raw or b"", "big")
        if next_number < following and (raw is not None or following > SHARD_FIRST):
            self._rows.put(Family.SHARDS, stream_keys.SHARD_COUNTER_KEY, _NUMBER.pack(following))

    def _numbers_found(self) -> tuple[int, ...]:
        return (0, *self._read_evidence())

    def _evidence_of(self, number: int) -> _Evidence:
        seen = self._read_evidence().get(number, _Evidence())
        return _Evidence(seen.lane, min(seen.first, seen.following), seen.following)

    def _read_evidence(self) -> dict[int, _Evidence]:
        """Return what the lanes and the records show about each shard. Reads them once."""
        if self._evidence is None:
            self._evidence = {}
            for lane, shard, first, following, is_dropped in self._frames():
                seen = self._evidence.setdefault(shard, _Evidence(lane, first, following))
                seen.first, seen.following = min(seen.first, first), max(seen.following, following)
                seen.is_dropped |= is_dropped
            for shard in self._shards_with_records():
                start, end = key_parts.prefix_range(shard.to_bytes(8, "big"))
                first_key = next(iter(self._store.scan(Family.STREAM_RECORDS, start, end)))[0]
                last_key = next(iter(self._store.scan(Family.STREAM_RECORDS, start, end, reverse=True)))[0]
                self._evidence[shard] = _Evidence(
                    0,
                    stream_keys.decode_stream_record_key(first_key)[1],
                    stream_keys.decode_stream_record_key(last_key)[1] + 1,
                )
        return self._evidence

    def _report_unknown(self) -> None:
        """Report the records of the log whose shard has no row, so that their topic is unknown."""
        for number, seen in sorted(self._read_evidence().items()):
            is_known = number in self._shards.rows or number in self._shards.deleted or seen.is_dropped
            if not is_known and seen.first < seen.following:
                text = f"a partition is lost: shard {number}, offsets {seen.first} to {seen.following - 1}"
                self.found.append(_loss("topic of an unknown name", text))

    def _frames(self) -> Iterator[tuple[int, int, int, int, bool]]:
        if not self._log.is_dir():
            return
        for directory in sorted(each for each in self._log.iterdir() if each.is_dir() and each.name.isdecimal()):
            try:
                if not LaneView.exists(directory):
                    continue
                lane = LaneView(directory)
            except CorruptionError:
                # The engine reports the damage when it opens the lane.
                continue
            try:
                for found in scan(lane, lane.start):
                    header = found.header
                    if header.kind in (COLUMNAR, KAFKA):
                        following = header.base_offset + header.last_delta + 1
                        yield int(directory.name), header.shard, header.base_offset, following, False
                    else:
                        yield int(directory.name), header.shard, OFFSET_MAX, 0, header.kind == DROP
            finally:
                lane.close()

    def _shards_with_records(self) -> Iterator[int]:
        start: bytes | None = b""
        while start is not None:
            row = next(iter(self._store.scan(Family.STREAM_RECORDS, start)), None)
            if row is None:
                return
            shard = stream_keys.decode_stream_record_key(row[0])[0]
            yield shard
            start = key_parts.prefix_range(shard.to_bytes(8, "big"))[1]

    def _committed(self, topic_id: UUID, partition: int) -> int:
        """Return the highest offset that a group committed. All offsets below it were assigned."""
        found = 0
        for key, raw in self._store.scan(Family.CONSUMER_OFFSETS):
            _, whose, number = stream_keys.decode_consumer_offset_key(key)
            if whose == topic_id and number == partition and len(raw) >= 9:
                found = max(found, int.from_bytes(raw[1:9], "big"))
        return found

    def _records(self) -> None:
        """Rebuild the index and tail rows of the `rocksdb` engine."""
        tails: dict[int, tuple[int, ...]] = {}
        for key, raw in self._store.scan(Family.STREAM_RECORD_INDEX, *key_parts.prefix_range(b"N")):
            if len(raw) == TAIL.size:
                tails[stream_keys.decode_stream_tail_key(key)] = TAIL.unpack(raw)
        metas = {}
        for key, raw in self._store.scan(Family.SHARDS, *key_parts.prefix_range(b"S")):
            meta = ShardMeta.decode(stream_keys.decode_shard_key(key), raw)
            if meta.engine is Engine.ROCKSDB:
                metas[meta.number] = meta
        wipe = Batch()
        wipe.delete_range(Family.STREAM_RECORD_INDEX, b"", _INDEX_END)
        self._store.write(wipe)
        for number, meta in metas.items():
            self._index_shard(meta, tails.get(number))

    def _index_shard(self, meta: ShardMeta, tail: tuple[int, ...] | None) -> None:
        shard, config = meta.number, meta.config
        records = size_bytes = 0
        following = 0 if tail is None else tail[0]
        newest_ms = TIME_NONE
        for row_key, row in self._store.scan(Family.STREAM_RECORDS, *key_parts.prefix_range(shard.to_bytes(8, "big"))):
            offset = stream_keys.decode_stream_record_key(row_key)[1]
            try:
                record = decode_row(row_key, row)
            except CorruptionError as error:
                self._rows.delete(Family.STREAM_RECORDS, row_key)
                self.found.append(_loss(f"shard {shard}", str(error)))
                continue
            records += 1
            size_bytes += len(row)
            following = max(following, offset + 1)
            for index_key, value in index_rows(shard, offset, record, config):
                self._rows.put(Family.STREAM_RECORD_INDEX, index_key, value)
            if record.timestamp_ms > newest_ms:
                newest_ms = record.timestamp_ms
                if config.index_times:
                    self._rows.put(
                        Family.STREAM_RECORD_INDEX, stream_keys.stream_time_key(shard, newest_ms, offset), b""
                    )
        if self._losses.hit(Family.STREAM_RECORDS, Family.STREAM_RECORD_INDEX):
            following = max(following, self._committed(meta.topic_id, meta.partition))
        if self._losses.in_log:
            # Lost records may have been confirmed and read. Their offsets must not be assigned again.
            following = max(following, meta.next_offset_min) + OFFSETS_SKIPPED
        if not following:
            # The shard was never written.
            return
        newest_ms = newest_ms if tail is None else max(newest_ms, tail[3])
        row = TAIL.pack(following, records, size_bytes, newest_ms)
        self._rows.put(Family.STREAM_RECORD_INDEX, stream_keys.stream_tail_key(shard), row)

    def _groups(self) -> None:
        topics: dict[UUID, bool] = {}
        for key, _ in self._store.scan(Family.CONSUMER_OFFSETS):
            group, topic_id, _ = stream_keys.decode_consumer_offset_key(key)
            if topic_id not in topics:
                raw = self._store.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(topic_id))
                topics[topic_id] = raw is not None
            if not topics[topic_id]:
                self._rows.delete(Family.CONSUMER_OFFSETS, key)
                continue
            listed = stream_keys.topic_group_key(topic_id, group)
            if self._store.get(Family.TOPIC_GROUPS, listed) is None:
                self._rows.put(Family.TOPIC_GROUPS, listed, b"")


def _partition(meta: ShardMeta) -> int:
    return meta.partition


def _topic_config(metas: list[ShardMeta]) -> TopicConfig:
    """Derive the settings of a topic from its shards."""
    shard = metas[0].config
    return TopicConfig(
        partitions=max(meta.partition for meta in metas) + 1,
        engine=metas[0].engine,
        durability=shard.durability,
        retention_ms=shard.retention_ms,
        retention_bytes=shard.retention_bytes,
        retention_records=shard.retention_records,
        compact=shard.compact,
        tombstone_retention_ms=shard.tombstone_retention_ms,
        index_keys=shard.index_keys,
        index_tags=shard.index_tags,
        index_times=shard.index_times,
        record_bytes_max=shard.record_bytes_max,
        append_time=shard.append_time,
    )


def _loss(subject: str, text: str, topic_id: str = "") -> Loss:
    return Loss(subject=subject, text=text, family=Family.SHARDS.label, ids=[topic_id] if topic_id else [])
