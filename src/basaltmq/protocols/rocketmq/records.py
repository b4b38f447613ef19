"""Messages as stream records, so that every protocol reads them, and records as messages.

    body             value, as sent (header `rocketmq.encoding` if compressed)
    tag              tag
    first key        key; all keys in header `rocketmq.keys` if there are several
    user properties  headers
    message group, lite topic, id, type, born time and host, trace context, priority: headers with the
                     prefix `rocketmq.`

A record of another protocol has none of these headers. Its message id is made from its shard and offset, its text
headers are properties, and bytes that are not UTF-8 are replaced.
"""

from __future__ import annotations

from typing import Final

from basaltmq.log.batches.record import Record, StoredRecord
from basaltmq.protocols.rocketmq.rules.messages import KEYS, RESERVED, TYPE_NAMES, checksum, message_type, millis
from basaltmq.wire import rocketmq_wire_pb2 as wire

ID: Final = RESERVED + "id"
TYPE: Final = RESERVED + "type"
GROUP: Final = RESERVED + "group"
BORN: Final = RESERVED + "born"
HOST: Final = RESERVED + "host"
ENCODING: Final = RESERVED + "encoding"
TRACE: Final = RESERVED + "trace"
PRIORITY: Final = RESERVED + "priority"
LITE: Final = RESERVED + "lite"
DELIVERY: Final = RESERVED + "delivery"
SCHEDULED: Final = RESERVED + "scheduled"
"""The key of the row from which a scheduled record was appended."""
DEAD_TOPIC: Final = RESERVED + "dead-topic"
DEAD_ID: Final = RESERVED + "dead-id"

PRIORITY_MAX: Final = (1 << 31) - 1
_GZIP: Final = b"gzip"


def record_of(message: wire.Message) -> Record:
    """Return the record that stores a valid message."""
    system = message.system_properties
    headers: list[tuple[str, bytes | None]] = [(ID, system.message_id.encode())]
    kind = message_type(message)
    if kind != wire.NORMAL:
        headers.append((TYPE, str(kind).encode()))
    if len(system.keys) > 1:
        headers.append((KEYS, " ".join(system.keys).encode()))
    if system.HasField("born_timestamp"):
        headers.append((BORN, str(millis(system.born_timestamp)).encode()))
    if system.born_host:
        headers.append((HOST, system.born_host.encode()))
    if system.body_encoding == wire.GZIP:
        headers.append((ENCODING, _GZIP))
    if system.HasField("message_group"):
        headers.append((GROUP, system.message_group.encode()))
    if system.HasField("lite_topic"):
        headers.append((LITE, system.lite_topic.encode()))
    if system.HasField("trace_context"):
        headers.append((TRACE, system.trace_context.encode()))
    if system.HasField("delivery_timestamp"):
        headers.append((DELIVERY, str(millis(system.delivery_timestamp)).encode()))
    if system.HasField("priority"):
        headers.append((PRIORITY, str(system.priority).encode()))
    headers += [(name, value.encode()) for name, value in message.user_properties.items()]
    return Record(
        message.body,
        system.keys[0].encode() if system.keys else None,
        tuple(headers),
        (system.tag.encode(),) if system.HasField("tag") else (),
    )


def dead_letter_of(record: StoredRecord, topic: str, shard: int) -> Record:
    """Return the copy of a record for the dead-letter topic of a group."""
    kept = [each for each in record.headers if each[0] not in (SCHEDULED, DEAD_TOPIC, DEAD_ID)]
    origin = [(DEAD_TOPIC, topic.encode()), (DEAD_ID, message_id_of(record, shard).encode())]
    return Record(record.value, record.key, (*kept, *origin), record.tags)


def message_group_of(record: Record) -> bytes:
    """Return the message group of a record, or nothing if it has none. A lite topic is one message group."""
    for name, value in record.headers:
        if name in (GROUP, LITE):
            return value or b""
    return b""


def message_id_of(record: StoredRecord, shard: int) -> str:
    for name, value in record.headers:
        if name == ID and value is not None:
            return _text(value)
    return f"{shard:016X}{record.offset:016X}"


def message_of(record: StoredRecord, shard: int, partition: int, host: str) -> wire.Message:
    """Return the message that a record stores. The caller adds the topic and what belongs to a delivery."""
    body = record.value or b""
    message = wire.Message(body=body)
    system = message.system_properties
    system.message_id = ""
    keys: list[str] = [] if record.key is None else [_text(record.key)]
    kind: int = wire.NORMAL
    born_ms = record.timestamp_ms
    system.body_encoding = wire.IDENTITY
    for name, raw in record.headers:
        if raw is None:
            continue
        if not name.startswith(RESERVED):
            message.user_properties[name] = _text(raw)
            continue
        text = _text(raw)
        if name == ID:
            system.message_id = text
        elif name == TYPE:
            stored = _number(text, wire.NORMAL)
            kind = stored if stored in TYPE_NAMES else wire.NORMAL
        elif name == KEYS:
            keys = text.split(" ")
        elif name == BORN:
            born_ms = _number(text, born_ms)
        elif name == HOST:
            system.born_host = text
        elif name == ENCODING:
            system.body_encoding = wire.GZIP if raw == _GZIP else wire.IDENTITY
        elif name == GROUP:
            system.message_group = text
        elif name == LITE:
            system.lite_topic = text
        elif name == TRACE:
            system.trace_context = text
        elif name == PRIORITY:
            system.priority = min(_number(text, 0), PRIORITY_MAX)
        elif name == DELIVERY:
            system.delivery_timestamp.FromMilliseconds(_number(text, 0))
        elif name == DEAD_TOPIC:
            system.dead_letter_queue.topic = text
        elif name == DEAD_ID:
            system.dead_letter_queue.message_id = text
    system.message_type = kind  # type: ignore[assignment]
    system.keys.extend(keys)
    if record.tags:
        system.tag = _text(record.tags[0])
    if not system.message_id:
        system.message_id = message_id_of(record, shard)
    # Clients disagree about the text of a CRC32: Java and Python expect hex digits, Node.js 1.0.8 a decimal number.
    system.body_digest.type = wire.MD5
    system.body_digest.checksum = checksum(wire.MD5, body) or ""
    system.born_timestamp.FromMilliseconds(max(0, born_ms))
    system.store_timestamp.FromMilliseconds(max(0, record.timestamp_ms))
    system.store_host = host
    system.queue_id = partition
    system.queue_offset = record.offset
    return message


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _number(text: str, otherwise: int) -> int:
    """Return the number in a header. Another protocol may have written any text; then return `otherwise`."""
    if text.isascii() and text.isdigit() and len(text) <= 15:
        number = int(text)
        return number if number < 1 << 47 else otherwise
    return otherwise
