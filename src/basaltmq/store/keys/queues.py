"""Every key layout, as encode/decode pairs.

Numbers are big-endian so that byte order is numeric order. Strings inside keys are UTF-8 behind a u16 length, so no
value can collide with a separator and no prefix of one key set reaches into another:

    lp(x)            | u16 length | bytes |
    configured       | uuid text (36 bytes) |
    hierarchy        | child uuid text | '|' | parent type |
    object name      | parent uuid (16) | lp(type) | name |
    preference       | uuid (16) |
    deleted object   | uuid (16) |
    link             | lp(remote container) | lp(link name) | role u8 |
    metadata         | message id u64 |
    content          | message id u64 | chunk u32 |
    queue entry      | queue uuid (16) | message id u64 |
    xid              | format i64, sign flipped | lp(global id) | lp(branch id) |
    branch draft     | as xid | number u64 |
    message          | lp(queue) | lp(fairness key) | enqueued ns u64 | id (16) |
    lease            | lp(queue) | id (16) |
    lease expiry     | expires ns u64 | lp(queue) | id (16) |
    queue            | queue name |
    state            | name |
    body             | body id (16) |
    content ref      | body id (16) | message id (16) |
    queue stats      | queue name |
    deleted queue    | queue name |
    lease call       | lp(queue) | token u64 |
    lease call expiry| expires ns u64 | lp(queue) | token u64 |
    timed message    | lp(queue) | at ns u64 | lp(fairness key) | enqueued ns u64 | id (16) |
    timer            | due ns u64 | kind (1) | lp(queue) |
    dedup            | lp(queue) | lp(publisher's id) |
    dedup expiry     | lp(queue) | expires ns u64 | lp(publisher's id) |
    consumer offset  | lp(group) | topic uuid (16) | partition u32 |
    quarantine       | lp(family label) | the row's own key |
    queue quarantine | lp(queue, empty if it is unknown) | found ns u64 | number u64 |
    topic group      | topic uuid (16) | lp(group) |
    shard counter    | 'N' |
    shard            | 'S' | shard u64 |
    shard name       | 'M' | topic uuid (16) | partition u32 |
    deleted shard    | 'X' | shard u64 |
    trimmed shard    | 'Y' | shard u64 |
    stream record    | shard u64 | offset u64 |
    stream tail      | 'N' | shard u64 |
    by key           | 'K' | shard u64 | hash64(key) | offset u64 |
    by tag           | 'G' | shard u64 | hash64(tag) | offset u64 |
    by time          | 'T' | shard u64 | running max ms i64, sign flipped | offset u64 |
    by expiry        | 'E' | expire at ms i64, sign flipped | shard u64 | offset u64 |
    log checkpoint   | 'C' | lane u32 |
    log synced       | 'P' | lane u32 |
    log changed      | 'X' | lane u32 |
    log unsynced     | 'U' | lane u32 | position u64 |
    log segment      | 'S' | lane u32 | first position u64 |
    frame            | 'O' | shard u64 | last offset u64 |
    deleted record   | 'D' | shard u64 | offset u64 |
    exchange         | 'e' | exchange name |
    binding          | 'b' | lp(source) | kind (1) | lp(destination) | lp(routing key) | hash of arguments u64 |
    policy           | 'p' | kind (1) | policy name |
    API key          | key id |
    import           | run |
    consumer group   | group |

Strings are compared by length first; only numbers and ids are promised to sort by value.

Names come from users: one that is too long or no Unicode text is an InvalidArgumentError. Numbers and ids come from
our own code: one that does not fit its field is a bug, and `struct.error` or an assert says so. A key read back that
has no known layout is a CorruptionError, and what a decoder accepts encodes to the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import repeat
from struct import Struct
from typing import Final, Protocol
from uuid import UUID

from basaltmq.errors import CorruptionError, InvalidArgumentError

STRING_BYTES_MAX: Final = 0xFFFF
"""What a u16 length can say."""

PREFIXES_KEPT: Final = 4096
"""Message prefixes kept ready; with names of usual length under 1 MiB."""

_U16: Final = Struct(">H")
_U32: Final = Struct(">I")
_U64: Final = Struct(">Q")
_CONTENT: Final = Struct(">QI")
_ENTRY: Final = Struct(">16sQ")
_TWO_U64: Final = Struct(">QQ")
_TIME_ID: Final = Struct(">Q16s")
_ID_BYTES: Final = 16
_SIGN: Final = 1 << 63
_UUID_TEXT_BYTES: Final = 36


def prefix_range(prefix: bytes) -> tuple[bytes, bytes | None]:
    """The [start, end) that holds exactly the keys beginning with `prefix`; no end if there is no key above."""
    stripped = prefix.rstrip(b"\xff")
    if not stripped:
        return prefix, None
    return prefix, stripped[:-1] + bytes((stripped[-1] + 1,))


def lp(value: str | bytes) -> bytes:
    """Length-prefix a string for use inside a key."""
    raw = _utf8(value) if isinstance(value, str) else value
    size = len(raw)
    if size > STRING_BYTES_MAX:
        raise InvalidArgumentError(f"a name of {size} bytes is too long: at most {STRING_BYTES_MAX} bytes of UTF-8")
    return _U16.pack(size) + raw


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"a name is not Unicode text: character {error.start} is half of a surrogate pair"
        ) from None


def take_lp(key: bytes, at: int) -> tuple[bytes, int]:
    """The length-prefixed bytes at `at`, and where the next part begins."""
    begin = at + 2
    if begin > len(key):
        raise _malformed(key)
    end = begin + int.from_bytes(key[at:begin], "big")
    if end > len(key):
        raise _malformed(key)
    return key[begin:end], end


def _take_text(key: bytes, at: int) -> tuple[str, int]:
    raw, at = take_lp(key, at)
    try:
        return raw.decode(), at
    except UnicodeDecodeError:
        raise _malformed(key) from None


def _malformed(key: bytes) -> CorruptionError:
    shown = key[:48].hex() + ("..." if len(key) > 48 else "")
    return CorruptionError(f"a key of {len(key)} bytes has no known layout: {shown}")


def _exactly(key: bytes, size: int) -> None:
    if len(key) != size:
        raise _malformed(key)


def configured_key(object_id: UUID) -> bytes:
    return str(object_id).encode()


def decode_configured_key(key: bytes) -> UUID:
    try:
        object_id = UUID(key.decode("ascii"))
    except ValueError:
        raise _malformed(key) from None
    if configured_key(object_id) != key:
        raise _malformed(key)
    return object_id


def hierarchy_key(child: UUID, parent_type: str) -> bytes:
    return hierarchy_prefix(child) + _whole(parent_type)


def hierarchy_prefix(child: UUID) -> bytes:
    return configured_key(child) + b"|"


def decode_hierarchy_key(key: bytes) -> tuple[UUID, str]:
    if key[_UUID_TEXT_BYTES : _UUID_TEXT_BYTES + 1] != b"|":
        raise _malformed(key)
    try:
        parent_type = key[_UUID_TEXT_BYTES + 1 :].decode()
    except UnicodeDecodeError:
        raise _malformed(key) from None
    return decode_configured_key(key[:_UUID_TEXT_BYTES]), parent_type


def object_name_key(parent: UUID, kind: str, name: str) -> bytes:
    return object_name_prefix(parent, kind) + _whole(name)


def object_name_prefix(parent: UUID, kind: str | None = None) -> bytes:
    return parent.bytes if kind is None else parent.bytes + lp(kind)


def decode_object_name_key(key: bytes) -> tuple[UUID, str, str]:
    kind, at = _take_text(key, _ID_BYTES)
    return UUID(bytes=key[:_ID_BYTES]), kind, _whole_text(key[at:])


def preference_key(preference_id: UUID) -> bytes:
    return preference_id.bytes


def decode_preference_key(key: bytes) -> UUID:
    _exactly(key, _ID_BYTES)
    return UUID(bytes=key)


def deleted_object_key(object_id: UUID) -> bytes:
    return object_id.bytes


def decode_deleted_object_key(key: bytes) -> UUID:
    _exactly(key, _ID_BYTES)
    return UUID(bytes=key)


def link_key(remote_container: str, link_name: str, role: int) -> bytes:
    return lp(remote_container) + lp(link_name) + bytes((role,))


def decode_link_key(key: bytes) -> tuple[str, str, int]:
    container, at = _take_text(key, 0)
    name, at = _take_text(key, at)
    _exactly(key, at + 1)
    return container, name, key[at]


def metadata_key(message_id: int) -> bytes:
    return _U64.pack(message_id)


def decode_metadata_key(key: bytes) -> int:
    _exactly(key, 8)
    return int.from_bytes(key, "big")


def content_key(message_id: int, chunk: int) -> bytes:
    return _CONTENT.pack(message_id, chunk)


def content_prefix(message_id: int) -> bytes:
    return _U64.pack(message_id)


def decode_content_key(key: bytes) -> tuple[int, int]:
    _exactly(key, _CONTENT.size)
    message_id, chunk = _CONTENT.unpack(key)
    return message_id, chunk


def queue_entry_key(queue_id: UUID, message_id: int) -> bytes:
    return _ENTRY.pack(queue_id.bytes, message_id)


def queue_entry_prefix(queue_id: UUID) -> bytes:
    return queue_id.bytes


def decode_queue_entry_key(key: bytes) -> tuple[UUID, int]:
    _exactly(key, _ENTRY.size)
    raw, message_id = _ENTRY.unpack(key)
    return UUID(bytes=raw), message_id


def xid_key(format_id: int, global_id: bytes, branch_id: bytes) -> bytes:
    if not -_SIGN <= format_id < _SIGN:
        raise InvalidArgumentError(f"the format {format_id} of a transaction id does not fit 64 bits")
    return _U64.pack(format_id + _SIGN) + lp(global_id) + lp(branch_id)


def decode_xid_key(key: bytes) -> tuple[int, bytes, bytes]:
    if len(key) < 8:
        raise _malformed(key)
    global_id, at = take_lp(key, 8)
    branch_id, at = take_lp(key, at)
    _exactly(key, at)
    return int.from_bytes(key[:8], "big") - _SIGN, global_id, branch_id


def branch_draft_key(format_id: int, global_id: bytes, branch_id: bytes, number: int) -> bytes:
    return xid_key(format_id, global_id, branch_id) + _U64.pack(number)


def branch_draft_prefix(format_id: int, global_id: bytes, branch_id: bytes) -> bytes:
    return xid_key(format_id, global_id, branch_id)


def decode_branch_draft_key(key: bytes) -> tuple[int, bytes, bytes, int]:
    return (*decode_xid_key(key[:-8]), int.from_bytes(key[-8:], "big"))


def message_key(queue: str, fairness_key: str, enqueued_ns: int, message_id: bytes) -> bytes:
    assert len(message_id) == _ID_BYTES, f"a message id has 16 bytes, not {len(message_id)}"
    return _known_prefix(queue, fairness_key) + _TIME_ID.pack(enqueued_ns, message_id)


def message_prefix(queue: str, fairness_key: str | None = None) -> bytes:
    return lp(queue) if fairness_key is None else lp(queue) + lp(fairness_key)


class Placed(Protocol):
    """What a message's key is made of."""

    @property
    def queue(self) -> str: ...

    @property
    def fairness_key(self) -> str: ...

    @property
    def enqueued_ns(self) -> int: ...

    @property
    def id(self) -> bytes: ...


def message_keys(messages: Iterable[Placed]) -> list[bytes]:
    """The keys of many messages, mostly of one queue, at less than the cost of one each."""
    made: list[bytes] = []
    append = made.append
    pack = _TIME_ID.pack
    queue: str | None = None
    prefixes: dict[str, bytes] = {}
    for message in messages:
        if message.queue != queue:
            queue = message.queue
            prefixes = {}
        fairness_key = message.fairness_key
        prefix = prefixes.get(fairness_key)
        if prefix is None:
            prefix = prefixes[fairness_key] = message_prefix(queue, fairness_key)
        message_id = message.id
        assert len(message_id) == _ID_BYTES, f"a message id has 16 bytes, not {len(message_id)}"
        append(prefix + pack(message.enqueued_ns, message_id))
    return made


@lru_cache(PREFIXES_KEPT)
def _known_prefix(queue: str, fairness_key: str) -> bytes:
    """Most of what a message's key costs is this part, and it is the same for many."""
    return message_prefix(queue, fairness_key)


def decode_message_key(key: bytes) -> tuple[str, str, int, bytes]:
    queue, at = _take_text(key, 0)
    fairness_key, at = _take_text(key, at)
    _exactly(key, at + _TIME_ID.size)
    enqueued_ns, message_id = _TIME_ID.unpack_from(key, at)
    return queue, fairness_key, enqueued_ns, message_id


def lease_key(queue: str, message_id: bytes) -> bytes:
    return lp(queue) + _sized_id(message_id)


def decode_lease_key(key: bytes) -> tuple[str, bytes]:
    queue, at = _take_text(key, 0)
    _exactly(key, at + _ID_BYTES)
    return queue, key[at:]


def lease_expiry_key(expires_ns: int, queue: str, message_id: bytes) -> bytes:
    return _U64.pack(expires_ns) + lp(queue) + _sized_id(message_id)


def lease_expiry_bound(expires_ns: int) -> bytes:
    """The end (exclusive) of all leases that expire before `expires_ns`."""
    return _U64.pack(expires_ns)


def decode_lease_expiry_key(key: bytes) -> tuple[int, str, bytes]:
    queue, at = _take_text(key, 8)
    _exactly(key, at + _ID_BYTES)
    return int.from_bytes(key[:8], "big"), queue, key[at:]


def queue_key(queue: str) -> bytes:
    return _whole(queue)


def decode_queue_key(key: bytes) -> str:
    return _whole_text(key)


def state_key(name: str) -> bytes:
    return _whole(name)


def decode_state_key(key: bytes) -> str:
    return _whole_text(key)


def body_key(body_id: bytes) -> bytes:
    return _sized_id(body_id)


def decode_body_key(key: bytes) -> bytes:
    _exactly(key, _ID_BYTES)
    return key


def content_ref_key(body_id: bytes, message_id: bytes) -> bytes:
    return _sized_id(body_id) + _sized_id(message_id)


def content_ref_prefix(body_id: bytes) -> bytes:
    return _sized_id(body_id)


def decode_content_ref_key(key: bytes) -> tuple[bytes, bytes]:
    _exactly(key, 2 * _ID_BYTES)
    return key[:_ID_BYTES], key[_ID_BYTES:]


def queue_stats_key(queue: str) -> bytes:
    return _whole(queue)


def decode_queue_stats_key(key: bytes) -> str:
    return _whole_text(key)


def deleted_queue_key(queue: str) -> bytes:
    return _whole(queue)


def decode_deleted_queue_key(key: bytes) -> str:
    return _whole_text(key)


def lease_call_key(queue: str, token: int) -> bytes:
    return lp(queue) + _U64.pack(token)


def lease_call_prefix(queue: str) -> bytes:
    return lp(queue)


def lease_call_key_of(prefix: bytes, token: int) -> bytes:
    """The same key from the prefix of its queue, for whoever makes many."""
    return prefix + _U64.pack(token)


def decode_lease_call_key(key: bytes) -> tuple[str, int]:
    queue, at = _take_text(key, 0)
    _exactly(key, at + 8)
    return queue, int.from_bytes(key[at:], "big")


def lease_call_expiry_key(expires_ns: int, queue: str, token: int) -> bytes:
    return _U64.pack(expires_ns) + lp(queue) + _U64.pack(token)


def lease_call_expiry_key_of(expires_ns: int, prefix: bytes, token: int) -> bytes:
    """The same key from `lease_call_prefix` of its queue."""
    return _U64.pack(expires_ns) + prefix + _U64.pack(token)


def decode_lease_call_expiry_key(key: bytes) -> tuple[int, str, int]:
    queue, at = _take_text(key, 8)
    _exactly(key, at + 8)
    return int.from_bytes(key[:8], "big"), queue, int.from_bytes(key[at:], "big")


def timed_message_key(queue: str, at_ns: int, fairness_key: str, enqueued_ns: int, message_id: bytes) -> bytes:
    return lp(queue) + _U64.pack(at_ns) + lp(fairness_key) + _TIME_ID.pack(enqueued_ns, message_id)


def timed_message_prefix(queue: str) -> bytes:
    return lp(queue)


def timed_message_bound(queue: str, at_ns: int) -> bytes:
    """The end (exclusive) of all of a queue's rows before `at_ns`."""
    return lp(queue) + _U64.pack(at_ns)


def decode_timed_message_key(key: bytes) -> tuple[str, int, str, int, bytes]:
    queue, at = _take_text(key, 0)
    fairness_key, end = _take_text(key, at + 8)
    _exactly(key, end + _TIME_ID.size)
    enqueued_ns, message_id = _TIME_ID.unpack_from(key, end)
    return queue, int.from_bytes(key[at : at + 8], "big"), fairness_key, enqueued_ns, message_id


def timed_of(message: bytes, at_ns: int) -> bytes:
    """The timed key of the message with this key, without taking it apart."""
    middle = 2 + int.from_bytes(message[:2], "big")
    return message[:middle] + _U64.pack(at_ns) + message[middle:]


def message_of(timed: bytes) -> tuple[bytes, int]:
    """The message's own key out of a timed one, and the time."""
    middle = 2 + int.from_bytes(timed[:2], "big")
    return timed[:middle] + timed[middle + 8 :], int.from_bytes(timed[middle : middle + 8], "big")


def timer_key(due_ns: int, kind: bytes, queue: str) -> bytes:
    return _U64.pack(due_ns) + kind + lp(queue)


def timer_bound(due_ns: int) -> bytes:
    """The end (exclusive) of all timers due before `due_ns`."""
    return _U64.pack(due_ns)


def decode_timer_key(key: bytes) -> tuple[int, bytes, str]:
    queue, at = _take_text(key, 9)
    _exactly(key, at)
    return int.from_bytes(key[:8], "big"), key[8:9], queue


def dedup_key(queue: str, publisher_id: bytes) -> bytes:
    return lp(queue) + lp(publisher_id)


def dedup_prefix(queue: str) -> bytes:
    return lp(queue)


def decode_dedup_key(key: bytes) -> tuple[str, bytes]:
    queue, at = _take_text(key, 0)
    publisher_id, at = take_lp(key, at)
    _exactly(key, at)
    return queue, publisher_id


def dedup_expiry_key(queue: str, expires_ns: int, publisher_id: bytes) -> bytes:
    return lp(queue) + _U64.pack(expires_ns) + lp(publisher_id)


def dedup_expiry_prefix(queue: str) -> bytes:
    return lp(queue)


def decode_dedup_expiry_key(key: bytes) -> tuple[str, int, bytes]:
    queue, at = _take_text(key, 0)
    publisher_id, end = take_lp(key, at + 8)
    _exactly(key, end)
    return queue, int.from_bytes(key[at : at + 8], "big"), publisher_id


def consumer_offset_key(group: str, topic_id: UUID, partition: int) -> bytes:
    return lp(group) + topic_id.bytes + _U32.pack(partition)


def decode_consumer_offset_key(key: bytes) -> tuple[str, UUID, int]:
    group, at = _take_text(key, 0)
    _exactly(key, at + _ID_BYTES + 4)
    return group, UUID(bytes=key[at : at + _ID_BYTES]), int.from_bytes(key[at + _ID_BYTES :], "big")


def topic_group_key(topic_id: UUID, group: str) -> bytes:
    return topic_id.bytes + lp(group)


def topic_group_prefix(topic_id: UUID) -> bytes:
    return topic_id.bytes


def decode_topic_group_key(key: bytes) -> tuple[UUID, str]:
    group, at = _take_text(key, _ID_BYTES)
    _exactly(key, at)
    return UUID(bytes=key[:_ID_BYTES]), group


SHARD_COUNTER_KEY: Final = b"N"
_SHARD: Final = Struct(">cQ")
_SHARD_NAME: Final = Struct(">c16sI")
_STREAM_RECORD: Final = Struct(">QQ")
_STREAM_INDEX: Final = Struct(">cQQQ")
_STREAM_INDEX_OFFSET: Final = Struct(">Q")


def shard_key(shard: int) -> bytes:
    return _SHARD.pack(b"S", shard)


def decode_shard_key(key: bytes) -> int:
    return _shard_of(key, b"S")


def shard_name_key(topic_id: UUID, partition: int) -> bytes:
    return _SHARD_NAME.pack(b"M", topic_id.bytes, partition)


def shard_name_prefix(topic_id: UUID) -> bytes:
    return b"M" + topic_id.bytes


def decode_shard_name_key(key: bytes) -> tuple[UUID, int]:
    _exactly(key, _SHARD_NAME.size)
    kind, raw, partition = _SHARD_NAME.unpack(key)
    if kind != b"M":
        raise _malformed(key)
    return UUID(bytes=raw), partition


def deleted_shard_key(shard: int) -> bytes:
    return _SHARD.pack(b"X", shard)


def decode_deleted_shard_key(key: bytes) -> int:
    return _shard_of(key, b"X")


def trimmed_shard_key(shard: int) -> bytes:
    return _SHARD.pack(b"Y", shard)


def decode_trimmed_shard_key(key: bytes) -> int:
    return _shard_of(key, b"Y")


def orphaned_topic_key(topic_id: UUID) -> bytes:
    return b"Z" + topic_id.bytes


def decode_orphaned_topic_key(key: bytes) -> UUID:
    _exactly(key, 17)
    if key[:1] != b"Z":
        raise _malformed(key)
    return UUID(bytes=key[1:])


def stream_record_key(shard: int, offset: int) -> bytes:
    return _STREAM_RECORD.pack(shard, offset)


def decode_stream_record_key(key: bytes) -> tuple[int, int]:
    _exactly(key, _STREAM_RECORD.size)
    shard, offset = _STREAM_RECORD.unpack(key)
    return shard, offset


def stream_tail_key(shard: int) -> bytes:
    return _SHARD.pack(b"N", shard)


def decode_stream_tail_key(key: bytes) -> int:
    return _shard_of(key, b"N")


def stream_index_key(kind: bytes, shard: int, hash64: int, offset: int) -> bytes:
    """A row that finds records by key (`K`) or tag (`G`)."""
    return _STREAM_INDEX.pack(kind, shard, hash64, offset)


def stream_index_keys(kind: bytes, shard: int, hashes: Iterable[bytes], offset: int) -> list[bytes]:
    """The same for many hashes, each as the 8 bytes it has in the key."""
    head, tail = _SHARD.pack(kind, shard), _STREAM_INDEX_OFFSET.pack(offset)
    return [head + each + tail for each in hashes]


def decode_stream_index_key(key: bytes) -> tuple[bytes, int, int, int]:
    _exactly(key, _STREAM_INDEX.size)
    kind, shard, hash64, offset = _STREAM_INDEX.unpack(key)
    return kind, shard, hash64, offset


def stream_time_key(shard: int, time_ms: int, offset: int) -> bytes:
    """Times before 1970 sort first."""
    return _STREAM_INDEX.pack(b"T", shard, time_ms + _SIGN, offset)


def decode_stream_time_key(key: bytes) -> tuple[int, int, int]:
    kind, shard, raw, offset = decode_stream_index_key(key)
    if kind != b"T":
        raise _malformed(key)
    return shard, raw - _SIGN, offset


def stream_expiry_key(expire_at_ms: int, shard: int, offset: int) -> bytes:
    """Time first, so that what is due is found without asking every shard."""
    return _STREAM_INDEX.pack(b"E", expire_at_ms + _SIGN, shard, offset)


def stream_expiry_bound(time_ms: int) -> bytes:
    """The end (exclusive) of all records that expire before `time_ms`."""
    return b"E" + _U64.pack(time_ms + _SIGN)


def decode_stream_expiry_key(key: bytes) -> tuple[int, int, int]:
    kind, raw, shard, offset = decode_stream_index_key(key)
    if kind != b"E":
        raise _malformed(key)
    return raw - _SIGN, shard, offset


_LOG_CHECKPOINT: Final = Struct(">cI")
_LOG_SEGMENT: Final = Struct(">cIQ")
_FRAME: Final = Struct(">cQQ")


def log_checkpoint_key(lane: int) -> bytes:
    return _LOG_CHECKPOINT.pack(b"C", lane)


def decode_log_checkpoint_key(key: bytes) -> int:
    _exactly(key, _LOG_CHECKPOINT.size)
    kind, lane = _LOG_CHECKPOINT.unpack(key)
    if kind != b"C":
        raise _malformed(key)
    number: int = lane
    return number


def log_synced_key(lane: int) -> bytes:
    return _LOG_CHECKPOINT.pack(b"P", lane)


def decode_log_synced_key(key: bytes) -> int:
    _exactly(key, _LOG_CHECKPOINT.size)
    kind, lane = _LOG_CHECKPOINT.unpack(key)
    if kind != b"P":
        raise _malformed(key)
    number: int = lane
    return number


def log_changed_key(lane: int) -> bytes:
    return _LOG_CHECKPOINT.pack(b"X", lane)


def decode_log_changed_key(key: bytes) -> int:
    _exactly(key, _LOG_CHECKPOINT.size)
    kind, lane = _LOG_CHECKPOINT.unpack(key)
    if kind != b"X":
        raise _malformed(key)
    number: int = lane
    return number


def log_unsynced_key(lane: int, position: int) -> bytes:
    return _LOG_SEGMENT.pack(b"U", lane, position)


def decode_log_unsynced_key(key: bytes) -> tuple[int, int]:
    _exactly(key, _LOG_SEGMENT.size)
    kind, lane, position = _LOG_SEGMENT.unpack(key)
    if kind != b"U":
        raise _malformed(key)
    return lane, position


def log_segment_key(lane: int, start: int) -> bytes:
    return _LOG_SEGMENT.pack(b"S", lane, start)


def decode_log_segment_key(key: bytes) -> tuple[int, int]:
    _exactly(key, _LOG_SEGMENT.size)
    kind, lane, start = _LOG_SEGMENT.unpack(key)
    if kind != b"S":
        raise _malformed(key)
    return lane, start


def frame_key(shard: int, last_offset: int) -> bytes:
    """By the last offset, so that one seek from any offset finds the frame that holds it."""
    return _FRAME.pack(b"O", shard, last_offset)


def frame_keys(shards: Iterable[int], last_offsets: Iterable[int]) -> list[bytes]:
    """The same for many frames."""
    return list(map(_FRAME.pack, repeat(b"O"), shards, last_offsets))


def decode_frame_key(key: bytes) -> tuple[int, int]:
    return _pair(key, b"O")


def deleted_record_key(shard: int, offset: int) -> bytes:
    return _FRAME.pack(b"D", shard, offset)


def decode_deleted_record_key(key: bytes) -> tuple[int, int]:
    return _pair(key, b"D")


def _pair(key: bytes, kind: bytes) -> tuple[int, int]:
    _exactly(key, _FRAME.size)
    found, shard, offset = _FRAME.unpack(key)
    if found != kind:
        raise _malformed(key)
    return shard, offset


def _shard_of(key: bytes, kind: bytes) -> int:
    _exactly(key, _SHARD.size)
    found, shard = _SHARD.unpack(key)
    if found != kind:
        raise _malformed(key)
    number: int = shard
    return number


def quarantine_key(label: str, key: bytes) -> bytes:
    return quarantine_prefix(label) + key


def quarantine_prefix(label: str) -> bytes:
    return lp(label)


def decode_quarantine_key(key: bytes) -> tuple[str, bytes]:
    label, at = _take_text(key, 0)
    return label, key[at:]


def queue_quarantine_key(queue: str, found_ns: int, number: int) -> bytes:
    return lp(queue) + _TWO_U64.pack(found_ns, number)


def queue_quarantine_prefix(queue: str) -> bytes:
    return lp(queue)


def decode_queue_quarantine_key(key: bytes) -> tuple[str, int, int]:
    queue, at = _take_text(key, 0)
    _exactly(key, at + _TWO_U64.size)
    return queue, *_TWO_U64.unpack_from(key, at)


def _sized_id(message_id: bytes) -> bytes:
    assert len(message_id) == _ID_BYTES, f"a message id has 16 bytes, not {len(message_id)}"
    return message_id


def _whole(name: str) -> bytes:
    """A key that is one string needs no length; it sorts as text and can be listed by prefix."""
    return lp(name)[2:]


def _whole_text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise _malformed(key) from None


_EXCHANGE: Final = b"e"
_BINDING: Final = b"b"
_POLICY: Final = b"p"


def exchange_key(name: str) -> bytes:
    return _EXCHANGE + _whole(name)


def exchange_prefix() -> bytes:
    return _EXCHANGE


def decode_exchange_key(key: bytes) -> str:
    if key[:1] != _EXCHANGE:
        raise _malformed(key)
    return _whole_text(key[1:])


def binding_key(source: str, kind: bytes, destination: str, routing_key: str, arguments_hash: int) -> bytes:
    """`kind` says what the destination is."""
    assert len(kind) == 1, f"the kind of a destination is one byte, not {kind!r}"
    return _BINDING + lp(source) + kind + lp(destination) + lp(routing_key) + _U64.pack(arguments_hash)


def binding_prefix() -> bytes:
    return _BINDING


def decode_binding_key(key: bytes) -> tuple[str, bytes, str, str, int]:
    if key[:1] != _BINDING:
        raise _malformed(key)
    source, at = _take_text(key, 1)
    kind = key[at : at + 1]
    destination, at = _take_text(key, at + 1)
    routing_key, at = _take_text(key, at)
    if len(kind) != 1 or len(key) != at + 8:
        raise _malformed(key)
    number: int = _U64.unpack_from(key, at)[0]
    return source, kind, destination, routing_key, number


def policy_key(kind: bytes, name: str) -> bytes:
    """`kind` says whose policy it is."""
    return policy_prefix(kind) + _whole(name)


def policy_prefix(kind: bytes) -> bytes:
    assert len(kind) == 1, f"the kind of a policy is one byte, not {kind!r}"
    return _POLICY + kind


def decode_policy_key(key: bytes) -> tuple[bytes, str]:
    if key[:1] != _POLICY or len(key) < 2:
        raise _malformed(key)
    return key[1:2], _whole_text(key[2:])


def api_key_key(key_id: str) -> bytes:
    return _whole(key_id)


def decode_api_key_key(key: bytes) -> str:
    return _whole_text(key)


def import_key(name: str) -> bytes:
    """`name` is the run's."""
    return _whole(name)


def decode_import_key(key: bytes) -> str:
    return _whole_text(key)


def producers_key(shard: int) -> bytes:
    """What is known of a shard's idempotent producers; shard 0, which is none, stands for all: ids given out."""
    return _U64.pack(shard)


def decode_producers_key(key: bytes) -> int:
    _exactly(key, 8)
    number: int = _U64.unpack(key)[0]
    return number


_TRANSACTION: Final = b"T"
_BUSY_TRANSACTION: Final = b"B"
_PENDING_OFFSET: Final = b"P"


def transaction_key(transactional_id: str) -> bytes:
    """What is known of a transactional id."""
    return _TRANSACTION + _whole(transactional_id)


def decode_transaction_key(key: bytes) -> str:
    if key[:1] != _TRANSACTION:
        raise _malformed(key)
    return _whole_text(key[1:])


def busy_transaction_key(transactional_id: str) -> bytes:
    """Stands while a transaction is open, or decided and not finished."""
    return _BUSY_TRANSACTION + _whole(transactional_id)


def decode_busy_transaction_key(key: bytes) -> str:
    if key[:1] != _BUSY_TRANSACTION:
        raise _malformed(key)
    return _whole_text(key[1:])


def pending_offset_key(transactional_id: str, group: str, topic_id: UUID, partition: int) -> bytes:
    """An offset that its group commits if the transaction does."""
    return pending_offset_prefix(transactional_id) + consumer_offset_key(group, topic_id, partition)


def pending_offset_prefix(transactional_id: str) -> bytes:
    return _PENDING_OFFSET + lp(transactional_id)


def decode_pending_offset_key(key: bytes) -> tuple[str, str, UUID, int]:
    if key[:1] != _PENDING_OFFSET:
        raise _malformed(key)
    transactional_id, at = _take_text(key, 1)
    return (transactional_id, *decode_consumer_offset_key(key[at:]))


def consumer_group_key(group: str) -> bytes:
    """What is kept of a group of Kafka's second protocol."""
    return _whole(group)


def decode_consumer_group_key(key: bytes) -> str:
    return _whole_text(key)


def transient_counts_key(queue: str) -> bytes:
    """How many transient messages a queue has that is not in memory: before those messages, in their family."""
    return lp(queue)


def decode_transient_counts_key(key: bytes) -> str:
    queue, at = _take_text(key, 0)
    if at != len(key):
        raise _malformed(key)
    return queue
