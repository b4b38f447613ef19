"""Shards: their rows, and a bounded cache for per-shard state.

A shard is one partition of a topic. Its name is `{topic id}_{partition}`. Internally it has a u64 number that is never
reused, so bytes of a deleted shard are never read as those of its successor (promise P10). The rows in the family
`shards` are written with the WAL, because nothing in them can be derived:

    'N'                        -> next shard number u64
    'S' shard u64              -> the row below
    'M' topic uuid, partition  -> number u64 of the shard that has this name
    'X' shard u64              -> engine u8, lane u32: deleted, but derived data may still exist
    'Z' topic uuid             -> the topic's row: its parent was deleted, its shards must be deleted

    row  | version u8 | engine u8 | flags u16 | lane u32 | topic uuid (16) | partition u32 |
         | start offset u64 | least next offset u64 | created ms i64 | config: JSON to the end |

One batch allocates numbers and creates the shards of a topic and its catalog object. The caller provides and writes
that batch. During a migration a shard exists twice: the copy has a row but no name (`SHADOW`) until the switch.

`next_offset_min` is a lower bound for the engine's next offset. Engines that lose the next offset (memory at a restart)
or cannot derive it (a gap at the end after deletes) raise it, so that no offset is reused.

A million idle shards cost rows, not memory: `Recent` caches a bounded number of states and never loads a shard twice.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from struct import Struct as Layout
from typing import Final, Generic, TypeVar
from uuid import UUID

import msgspec

from basaltmq.decoding import json_decoder
from basaltmq.durability import Durability
from basaltmq.errors import (
    CorruptionError,
    InvalidArgumentError,
    InvalidConfigError,
    LimitExceededError,
    ShardExistsError,
    ShardNotFoundError,
)
from basaltmq.log.batches.record import RECORD_BYTES_LIMIT, RECORD_BYTES_MAX
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys

ROW_VERSION: Final = 1
_ROW: Final = Layout(">BBHI16sIQQq")
_NUMBER: Final = Layout(">Q")
_DELETED: Final = Layout(">BI")

SHADOW: Final = 1
"""Flag of a migration copy, which has no name row."""

SHARD_FIRST: Final = 1
"""Zero is not a valid shard number, so an unset field is detected."""

OFFSET_MAX: Final = (1 << 63) - 1
"""Offsets are int64 in Arrow and in Kafka's protocol."""

PARTITION_MAX: Final = (1 << 31) - 1
"""Kafka's partition numbers are int32."""

SHARDS_PER_BATCH_MAX: Final = 100_000
"""Maximum shards created in one batch: about 15 MB of rows."""

SHARDS_CACHED_MAX: Final = 16_384
"""Decoded rows in the cache: about 10 MB."""

CONFIGS_CACHED_MAX: Final = 1_024
"""Decoded configs in the cache. The shards of a topic share one, and most topics have the same."""

DAY_MS: Final = 24 * 60 * 60 * 1000


class Engine(enum.StrEnum):
    """The storage engines."""

    MEMORY = "memory"
    ROCKSDB = "rocksdb"
    SEGMENT = "segment"


_ENGINE_CODES: Final = {Engine.MEMORY: 1, Engine.ROCKSDB: 2, Engine.SEGMENT: 3}
_ENGINES: Final = {code: engine for engine, code in _ENGINE_CODES.items()}


class MessageType(enum.StrEnum):
    """Types of RocketMQ messages."""

    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    PRIORITY = "PRIORITY"
    LITE = "LITE"


class ShardConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    """Settings of a shard, derived from its topic. None means no limit."""

    durability: Durability = Durability.SYNCED
    retention_ms: int | None = None
    """Retention deletes records older than this, oldest first."""
    retention_bytes: int | None = None
    """Retention deletes the oldest records while the shard is larger than this."""
    retention_records: int | None = None
    compact: bool = False
    """Keep only the latest record per key. Records without a key are kept."""
    tombstone_retention_ms: int = DAY_MS
    """How long a tombstone (null value) stays visible before compaction removes it."""
    index_keys: bool = True
    index_tags: bool = True
    index_times: bool = True
    """Without an index, a lookup scans. The result is the same."""
    record_bytes_max: int = RECORD_BYTES_MAX
    append_time: bool = False
    """The broker replaces the timestamps of Kafka producers' record batches with its own time."""

    def check(self) -> None:
        """Reject invalid values."""
        for name in ("retention_ms", "retention_bytes", "retention_records"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidConfigError(f"{name} is {value}; use 0 or more, or None for no limit")
        if self.tombstone_retention_ms < 0:
            raise InvalidConfigError(f"tombstone_retention_ms is {self.tombstone_retention_ms}; use 0 or more")
        if not 1 <= self.record_bytes_max <= RECORD_BYTES_LIMIT:
            raise InvalidConfigError(
                f"record_bytes_max is {self.record_bytes_max}; it must be between 1 and {RECORD_BYTES_LIMIT}"
            )

    @property
    def retains(self) -> bool:
        """Whether retention or compaction applies to the shard, apart from expiry."""
        return (
            self.compact
            or self.retention_ms is not None
            or self.retention_bytes is not None
            or self.retention_records is not None
        )


class ShardSpec(msgspec.Struct, frozen=True):
    """Parameters of a shard to create."""

    topic_id: UUID
    partition: int
    engine: Engine
    config: ShardConfig = ShardConfig()
    lane: int = 0
    start_offset: int = 0
    flags: int = 0

    def check(self) -> None:
        self.config.check()
        check_compaction(self.engine, self.config)
        check_durability(self.engine, self.config.durability)


def check_compaction(engine: Engine, config: ShardConfig) -> None:
    """Reject compaction without a key index, except in the segment engine, which needs none."""
    if config.compact and not config.index_keys and engine is not Engine.SEGMENT:
        raise InvalidConfigError(
            f"compaction in engine {engine.value} needs the key index: set index_keys, or disable compact"
        )


def check_durability(engine: Engine, durability: Durability) -> None:
    """Reject durability levels that the memory engine cannot provide."""
    if engine is Engine.MEMORY and durability is not Durability.MEMORY:
        raise InvalidConfigError(
            f"the memory engine stores nothing on disk and cannot provide durability {durability.value!r}; "
            "use durability 'memory', or the engine 'rocksdb' or 'segment'"
        )


class ShardMeta(msgspec.Struct, frozen=True, gc=False):
    """A decoded shard row."""

    number: int
    topic: bytes
    """The topic's id as bytes. Most users do not need it, and creating a UUID costs more than the other fields."""
    partition: int
    engine: Engine
    config: ShardConfig
    lane: int = 0
    flags: int = 0
    start_offset: int = 0
    next_offset_min: int = 0
    created_ms: int = 0

    @property
    def topic_id(self) -> UUID:
        return UUID(bytes=self.topic)

    @property
    def name(self) -> str:
        return shard_name(self.topic_id, self.partition)

    def encode(self) -> bytes:
        head = _ROW.pack(
            ROW_VERSION,
            _ENGINE_CODES[self.engine],
            self.flags,
            self.lane,
            self.topic,
            self.partition,
            self.start_offset,
            self.next_offset_min,
            self.created_ms,
        )
        return head + msgspec.json.encode(self.config)

    @classmethod
    def decode(cls, number: int, raw: bytes) -> ShardMeta:
        if len(raw) < _ROW.size:
            raise CorruptionError(f"the row of shard {number} has {len(raw)} bytes, fewer than {_ROW.size}")
        version, engine, flags, lane, topic, partition, start, least, created = _ROW.unpack_from(raw)
        if version != ROW_VERSION or engine not in _ENGINES:
            raise CorruptionError(f"the row of shard {number} has unknown version {version} or engine {engine}")
        try:
            config = _decode_config(raw[_ROW.size :])
        except msgspec.MsgspecError as error:
            raise CorruptionError(f"the row of shard {number} has a damaged config: {error}") from error
        return cls(number, topic, partition, _ENGINES[engine], config, lane, flags, start, least, created)


_decode_json: Final = json_decoder(ShardConfig)


@lru_cache(maxsize=CONFIGS_CACHED_MAX)
def _decode_config(raw: bytes) -> ShardConfig:
    return _decode_json(raw)


def shard_name(topic_id: UUID, partition: int) -> str:
    return f"{topic_id}_{partition}"


V = TypeVar("V")


class Recent(Generic[V]):
    """A cache of objects by shard number that keeps at most one live object per shard.

    A lock inside the object protects the shard, because there is only one object per shard. All callers get the same
    object while any of them holds it, even if it was evicted.

    Hits take no lock and add the number to a set. Eviction removes the oldest object, but gives used ones a second
    chance. An evicted object that is still referenced stays reachable through a weak reference.
    """

    def __init__(self, load: Callable[[int], V], limit: int) -> None:
        self._load = load
        self._limit = limit
        self._recent: OrderedDict[int, V] = OrderedDict()
        self._used: set[int] = set()
        self._held: dict[int, weakref.ref[V]] = {}
        self._lock = threading.RLock()

    def get(self, number: int) -> V:
        found = self._recent.get(number)
        if found is not None:
            self._used.add(number)
            return found
        return self._load_or_revive(number)

    def _load_or_revive(self, number: int) -> V:
        with self._lock:
            recent = self._recent
            found = recent.get(number)
            if found is None:
                reference = self._held.pop(number, None)
                found = None if reference is None else reference()
                if found is None:
                    found = self._load(number)
                if len(recent) >= self._limit:
                    self._make_room()
                recent[number] = found
            return found

    def _make_room(self) -> None:
        recent = self._recent
        used = self._used
        number, oldest = recent.popitem(last=False)
        while number in used:
            used.discard(number)
            recent[number] = oldest
            number, oldest = recent.popitem(last=False)
        reference = weakref.ref(oldest)
        del oldest
        if reference() is not None:
            self._held[number] = reference
            if len(self._held) > self._limit:
                self._held = {at: each for at, each in self._held.items() if each() is not None}
        if len(used) > self._limit:
            # These numbers were added after their eviction.
            used.clear()

    def forget(self, number: int) -> V | None:
        """Remove and return the object if it is loaded. The next `get` loads it again."""
        with self._lock:
            self._used.discard(number)
            reference = self._held.pop(number, None)
            return self._recent.pop(number, None if reference is None else reference())

    def loaded(self) -> list[V]:
        """Return all live objects."""
        with self._lock:
            held = [thing for reference in self._held.values() if (thing := reference()) is not None]
            return [*self._recent.values(), *held]

    def __len__(self) -> int:
        return len(self._recent)


class _Cached:
    """A decoded row. A separate class, because a Struct does not support weak references."""

    __slots__ = ("__weakref__", "meta")

    def __init__(self, meta: ShardMeta) -> None:
        self.meta = meta


class Shards:
    """The shard rows of one store."""

    def __init__(self, store: Store, clock_ms: Callable[[], int]) -> None:
        self._store = store
        self._clock_ms = clock_ms
        self._lock = threading.RLock()
        self._cache: Recent[_Cached] = Recent(self._load, SHARDS_CACHED_MAX)
        raw = store.get(Family.SHARDS, stream_keys.SHARD_COUNTER_KEY)
        self._next_number = SHARD_FIRST if raw is None else int(_NUMBER.unpack(raw)[0])

    def get(self, number: int) -> ShardMeta:
        return self._cache.get(number).meta

    def find(self, topic_id: UUID, partition: int) -> ShardMeta:
        """Return the shard that has this name."""
        number = self.number_of(topic_id, partition)
        if number is None:
            raise ShardNotFoundError(f"there is no shard {shard_name(topic_id, partition)}")
        return self.get(number)

    def number_of(self, topic_id: UUID, partition: int) -> int | None:
        raw = self._store.get(Family.SHARDS, stream_keys.shard_name_key(topic_id, partition))
        return None if raw is None else int(_NUMBER.unpack(raw)[0])

    def of_topic(self, topic_id: UUID) -> list[tuple[int, int]]:
        """Return (partition, shard number) of the topic's shards, ordered by partition."""
        start, end = key_parts.prefix_range(stream_keys.shard_name_prefix(topic_id))
        rows = self._store.scan(Family.SHARDS, start, end)
        return [(stream_keys.decode_shard_name_key(key)[1], int(_NUMBER.unpack(raw)[0])) for key, raw in rows]

    def listed(self, after: int = 0, limit: int | None = None, engine: Engine | None = None) -> Iterator[ShardMeta]:
        """Yield the shards with a number above `after`, ordered by number."""
        given = 0
        for key, raw in self._store.scan(Family.SHARDS, stream_keys.shard_key(after + 1), b"T"):
            meta = ShardMeta.decode(stream_keys.decode_shard_key(key), raw)
            if engine is None or meta.engine is engine:
                yield meta
                given += 1
                if given == limit:
                    return

    def plan_create(self, batch: Batch, specs: Sequence[ShardSpec]) -> list[ShardMeta]:
        """Add to `batch` the creation of shards. If the batch is not written, their numbers stay unused.

        Hold `exclusive` until the batch is written. A counter written late would go back and assign numbers twice.
        """
        if len(specs) > SHARDS_PER_BATCH_MAX:
            raise LimitExceededError(
                f"{len(specs)} shards exceed the limit of {SHARDS_PER_BATCH_MAX} per batch; create them in steps"
            )
        checked = None
        for spec in specs:
            if spec.config is not checked:
                spec.check()
                checked = spec.config
            if not 0 <= spec.partition <= PARTITION_MAX:
                raise InvalidArgumentError(f"partition {spec.partition} is out of range: 0 to {PARTITION_MAX}")
        named = [spec for spec in specs if not spec.flags & SHADOW]
        names = [stream_keys.shard_name_key(spec.topic_id, spec.partition) for spec in named]
        for spec, present in zip(named, self._store.get_many(Family.SHARDS, names), strict=True):
            if present is not None:
                raise ShardExistsError(f"the shard {shard_name(spec.topic_id, spec.partition)} already exists")
        created_ms = self._clock_ms()
        with self._lock:
            first = self._next_number
            self._next_number += len(specs)
            batch.put(Family.SHARDS, stream_keys.SHARD_COUNTER_KEY, _NUMBER.pack(self._next_number))
        metas = []
        for number, spec in enumerate(specs, first):
            meta = ShardMeta(
                number,
                spec.topic_id.bytes,
                spec.partition,
                spec.engine,
                spec.config,
                spec.lane,
                spec.flags,
                spec.start_offset,
                spec.start_offset,
                created_ms,
            )
            batch.put(Family.SHARDS, stream_keys.shard_key(number), meta.encode())
            if not spec.flags & SHADOW:
                batch.put(
                    Family.SHARDS, stream_keys.shard_name_key(spec.topic_id, spec.partition), _NUMBER.pack(number)
                )
            metas.append(meta)
        return metas

    def create(self, specs: Sequence[ShardSpec]) -> list[ShardMeta]:
        """Create shards in one batch, written but not synced."""
        with self._lock:
            batch = Batch()
            metas = self.plan_create(batch, specs)
            self._store.write(batch)
        return metas

    def plan_delete(self, batch: Batch, number: int, *, derived: bool) -> ShardMeta:
        """Add to `batch` the deletion of a shard's row and name. Write the batch, then call `forget`.

        With `derived`, a marker row records until `cleaned` that derived data of the shard must still be removed.
        """
        meta = self.get(number)
        batch.delete(Family.SHARDS, stream_keys.shard_key(number))
        batch.delete(Family.PRODUCERS, stream_keys.producers_key(number))
        if not meta.flags & SHADOW:
            batch.delete(Family.SHARDS, stream_keys.shard_name_key(meta.topic_id, meta.partition))
        if derived:
            marker = _DELETED.pack(_ENGINE_CODES[meta.engine], meta.lane)
            batch.put(Family.SHARDS, stream_keys.deleted_shard_key(number), marker)
        return meta

    def plan_update(self, batch: Batch, meta: ShardMeta) -> None:
        """Add to `batch` a changed shard row. Write the batch, then call `forget` to reload the row."""
        batch.put(Family.SHARDS, stream_keys.shard_key(meta.number), meta.encode())

    def plan_name(self, batch: Batch, meta: ShardMeta) -> None:
        """Add to `batch` the row that assigns the shard's name to it."""
        batch.put(Family.SHARDS, stream_keys.shard_name_key(meta.topic_id, meta.partition), _NUMBER.pack(meta.number))

    def update(
        self,
        number: int,
        *,
        start_offset: int | None = None,
        next_offset_min: int | None = None,
        config: ShardConfig | None = None,
    ) -> ShardMeta:
        """Change and write a shard row, not synced. Offsets never decrease. See also `batch_update`."""
        with self._lock:
            batch = Batch()
            meta = self.batch_update(
                batch, number, start_offset=start_offset, next_offset_min=next_offset_min, config=config
            )
            if len(batch):
                self._store.write(batch)
                self._cache.get(number).meta = meta
        return meta

    def batch_update(
        self,
        batch: Batch,
        number: int,
        *,
        start_offset: int | None = None,
        next_offset_min: int | None = None,
        config: ShardConfig | None = None,
    ) -> ShardMeta:
        """As `update`, but add the change to the caller's batch. The caller then calls `forget`."""
        meta = self.get(number)
        changed = msgspec.structs.replace(
            meta,
            start_offset=max(meta.start_offset, start_offset or 0),
            next_offset_min=max(meta.next_offset_min, next_offset_min or 0, start_offset or 0),
            config=meta.config if config is None else config,
        )
        if changed != meta:
            self.plan_update(batch, changed)
        return changed

    def exclusive(self) -> threading.RLock:
        """Return the lock to hold from reading rows until the resulting batch is written.

        Lock order: an engine's shard lock comes before this lock.
        """
        return self._lock

    def forget(self, number: int) -> None:
        self._cache.forget(number)

    def deleted(self, engine: Engine) -> list[tuple[int, int]]:
        """Return (number, lane) of an engine's deleted shards that still have derived data."""
        code = _ENGINE_CODES[engine]
        start, end = key_parts.prefix_range(b"X")
        found = []
        for key, raw in self._store.scan(Family.SHARDS, start, end):
            of, lane = _DELETED.unpack(raw)
            if of == code:
                found.append((stream_keys.decode_deleted_shard_key(key), lane))
        return found

    def with_derived(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return (number, lane) of those of the deleted shards that still have derived data."""
        rows = self._store.get_many(Family.SHARDS, [stream_keys.deleted_shard_key(number) for number in numbers])
        return [(number, _DELETED.unpack(raw)[1]) for number, raw in zip(numbers, rows, strict=True) if raw is not None]

    def _load(self, number: int) -> _Cached:
        raw = self._store.get(Family.SHARDS, stream_keys.shard_key(number))
        if raw is None:
            raise ShardNotFoundError(f"shard {number} does not exist; it was deleted, or never created")
        return _Cached(ShardMeta.decode(number, raw))


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Encode numbers as [first, count] runs. The shards of a topic mostly have consecutive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs
