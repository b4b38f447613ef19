"""Produce: appends record batches to the log as received, with offsets assigned and records not decoded.

    acks all   response when the batch is as durable as its topic demands (`basalt.durability`, default synced)
    acks 1     response after the write call
    acks 0     no response

Requests of one connection are appended and completed in order. A request that waits for its fsync does not delay the
appends behind it, so one fsync serves many requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from basaltmq.broker.auth.permissions import WRITE
from basaltmq.broker.scheduling.turns import Turns
from basaltmq.durability import Durability
from basaltmq.errors import BasaltError, CorruptionError, StorageError, StoreStalledError
from basaltmq.log.batches import codecs
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.kafka import (
    CONTROL,
    HEADER_BYTES,
    MAGIC,
    TRANSACTIONAL,
    KafkaHeader,
    RecordReader,
    check_batch,
    columns,
    read_header,
    recompressed,
)
from basaltmq.protocols.kafka.admin.topic_settings import AFTER_MAX, BEFORE_MAX, producer_rules
from basaltmq.protocols.kafka.context import Client, Context, PipelinedResponse, Respond, Response, awaited
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.errors import Refused
from basaltmq.protocols.kafka.wire.schema import Fields
from basaltmq.streams.adapter import Append
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.topics import TopicConfig

ALL: Final = -1
BLOCKED_MS_MAX: Final = 10_000
"""How long a produce request waits for an alarm to clear before it fails with REQUEST_TIMED_OUT."""

PARTITIONS_PER_TURN_MAX: Final = 100
"""Partitions of a request that are appended in one turn of the loop: 10 ms. More take several turns."""

LOOP_DECODED_RECORDS_MAX: Final = 500
"""Records of a request that are decoded in the loop: 5 ms. More are decoded in a thread."""

BATCHES_SINCE: Final = 3
"""First version that carries only record batches of format 2."""

ZSTD_SINCE: Final = 7
_MAGIC_AT: Final = 16

Pending = tuple[Fields, SegmentEngine, Append, int]
"""Partition response, engine, append position, and batch size in bytes."""


def produce(context: Context, client: Client, request: Request) -> Response:
    if context.node.alarms.reason(context.vhost.name) is not None:
        return _after_unblock(context, client, request)
    return _accepted(context, client, request)


def _accepted(context: Context, client: Client, request: Request) -> Response:
    if _needs_thread(context, request):
        return _prepared(context, client, request)
    return _appended(context, client, request)


def _needs_thread(context: Context, request: Request) -> bool:
    """Whether batches must be compressed, or many records decoded, before the append."""
    decoded = 0
    for topic in request.body["topics"]:
        config = _config_of(context, topic)
        if config is None:
            continue
        if _codec_of(config) is not None:
            return True
        if _decodes(config):
            decoded += sum([_record_count(each["records"]) for each in topic["partitions"]])
    return decoded > LOOP_DECODED_RECORDS_MAX


def _config_of(context: Context, topic: Fields) -> TopicConfig | None:
    try:
        return context.route(topic["name"], topic["partitions"][0]["index"]).topic.config
    except (BasaltError, IndexError):
        return None


def _codec_of(config: TopicConfig) -> int | None:
    """Return the compression that the broker chooses for a topic, or None."""
    return producer_rules(config.kafka).codec if config.kafka else None


def _decodes(config: TopicConfig) -> bool:
    """Whether the records of a batch are decoded when it is appended."""
    return config.index_keys or config.compact or producer_rules(config.kafka).before_ms is not None


def _record_count(raw: bytes | None) -> int:
    return 0 if raw is None or len(raw) < HEADER_BYTES else read_header(raw).records


async def _prepared(context: Context, client: Client, request: Request) -> Fields | None:
    """Compress and decode batches as their topics require, in a thread, then append them."""
    for topic in request.body["topics"]:
        config = _config_of(context, topic)
        if config is None or not (_decodes(config) or _codec_of(config) is not None):
            continue
        if not client.may(WRITE, topic["name"]):
            continue
        for each in topic["partitions"]:
            each["records"], each["decoded"] = await asyncio.to_thread(
                _prepare, each["records"], request.version, config, context.now_ms()
            )
    return await awaited(_appended(context, client, request))


def _prepare(
    raw: bytes | None, version: int, config: TopicConfig, now_ms: int
) -> tuple[bytes | Exception, ColumnBatch | None]:
    """Return a checked batch with the compression of its topic, or the error that refuses it.

    Also return its records, if the topic has an index of keys.
    """
    rules = producer_rules(config.kafka)
    records: ColumnBatch | None = None
    try:
        header = _checked(raw, version, config.record_bytes_max)
        assert raw is not None, "it was checked"
        if _decodes(config):
            check_batch(raw)
            _check_records(raw, header, config, now_ms)
            records = columns(raw, config.record_bytes_max) if config.index_keys else None
        if rules.codec is not None and header.codec != rules.codec:
            raw = recompressed(raw, rules.codec, rules.level, config.record_bytes_max)
    except (Refused, BasaltError) as error:
        return error, None
    return raw, records


async def _after_unblock(context: Context, client: Client, request: Request) -> Fields | None:
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_alarm(reason: str | None) -> None:
        if reason is None and not over.done():
            over.set_result(None)

    stop = context.node.alarms.listen(on_alarm, context.vhost.name)
    try:
        await asyncio.wait_for(over, min(max(0, request.body["timeout_ms"]), BLOCKED_MS_MAX) / 1000)
    except TimeoutError:
        reason = context.node.alarms.reason(context.vhost.name)
        return None if request.body["acks"] == 0 else _all_refused(request, e.REQUEST_TIMED_OUT, reason)
    finally:
        stop()
    return await awaited(_accepted(context, client, request))


def _all_refused(request: Request, code: int, message: str | None) -> Fields:
    return {
        "topics": [
            {
                "name": topic["name"],
                "partitions": [
                    {"index": each["index"], "error_code": code, "error_message": message}
                    for each in topic["partitions"]
                ],
            }
            for topic in request.body["topics"]
        ]
    }


def _appended(context: Context, client: Client, request: Request) -> Response:
    acks = request.body["acks"]
    if acks not in {ALL, 0, 1}:
        return _all_refused(request, e.INVALID_REQUIRED_ACKS, f"acks must be 0, 1 or all, not {acks}")
    waiting: list[Pending] = []
    body: Fields = {"topics": []}
    steps = _append_all(context, client, request, body, waiting)
    if sum([len(topic["partitions"]) for topic in request.body["topics"]]) > PARTITIONS_PER_TURN_MAX:
        return _append_in_turns(context, steps, body, waiting, acks)
    for _ in steps:
        pass
    return _confirmed(context, body, waiting, acks)


def _append_all(
    context: Context, client: Client, request: Request, body: Fields, waiting: list[Pending]
) -> Iterator[None]:
    """Append the batches of a request, and yield after each partition."""
    level = None if request.body["acks"] == ALL else Durability.WRITTEN
    for topic in request.body["topics"]:
        partitions: list[Fields] = []
        body["topics"].append({"name": topic["name"], "partitions": partitions})
        for each in topic["partitions"]:
            response: Fields = {"index": each["index"]}
            partitions.append(response)
            try:
                _append(context, client, topic["name"], each, request, level, response, waiting)
            except Refused as refused:
                response |= {"error_code": refused.code, "error_message": str(refused)}
            except CorruptionError as error:
                response |= {"error_code": e.CORRUPT_MESSAGE, "error_message": str(error)}
            except BasaltError as error:
                if isinstance(error, StorageError) and not isinstance(error, StoreStalledError):
                    context.vhost.fail(error)
                response |= {"error_code": e.code_of(error), "error_message": str(error)}
            yield


async def _append_in_turns(
    context: Context, steps: Iterator[None], body: Fields, waiting: list[Pending], acks: int
) -> Fields | None:
    turns = Turns()
    try:
        for _ in steps:
            await turns.yield_if_due()
    except asyncio.CancelledError:
        # The connection is closed. What was appended becomes visible after its sync.
        confirmed = _confirmed(context, body, waiting, acks)
        if isinstance(confirmed, PipelinedResponse):
            confirmed.start(lambda _body, _error: None)
        raise
    return await awaited(_confirmed(context, body, waiting, acks))


def _confirmed(context: Context, body: Fields, waiting: list[Pending], acks: int) -> Fields | PipelinedResponse | None:
    """Return the response, at once or after the sync of the appended batches."""
    if any(append.durability is Durability.SYNCED for _, _, append, _ in waiting):
        return PipelinedResponse(_Confirming(context, body, waiting).start)
    _notify_appended(context, waiting)
    return None if acks == 0 else body


def _append(
    context: Context,
    client: Client,
    name: str,
    asked: Fields,
    request: Request,
    level: Durability | None,
    response: Fields,
    waiting: list[Pending],
) -> None:
    raw = asked["records"]
    client.check(WRITE, name)
    topic, engine, shard = context.route(name, asked["index"])
    header = _checked(raw, request.version, topic.config.record_bytes_max)
    if "decoded" not in asked:
        _check_records(raw, header, topic.config, context.now_ms())
    if level is not None and topic.config.level is Durability.MEMORY:
        level = None
    if header.attributes & TRANSACTIONAL:
        context.transactions.check_produce(request.body["transactional_id"], header, shard)
        # Ignore the requested acks: a committed transaction must have its records.
        level = None
    if header.producer_id >= 0:
        before = context.producers.check(engine, shard, header)
        if before is not None:
            # A retry of a batch that is already in the log. The response still waits until that batch is durable.
            response["base_offset"] = before
            wanted = topic.config.level if level is None else level
            waiting.append((response, engine, Append(shard, before, before, wanted, 0), 0))
            return
    append = engine.append_kafka(shard, raw, level, asked.get("decoded"))
    if header.producer_id >= 0:
        context.producers.appended(shard, header, append.base_offset)
    response["base_offset"] = append.base_offset
    response["log_append_time_ms"] = append.append_time_ms
    response["log_start_offset"] = engine.state_of(shard).start_offset
    waiting.append((response, engine, append, len(raw)))


def _check_records(raw: bytes, header: KafkaHeader, config: TopicConfig, now_ms: int) -> None:
    if not config.append_time:
        _check_times(raw, header, config, now_ms)
    if config.compact:
        _check_keys(raw, config)


def _check_times(raw: bytes, header: KafkaHeader, config: TopicConfig, now_ms: int) -> None:
    """Refuse timestamps that are too far from the broker's clock. Records are decoded only if old ones are refused."""
    rules = producer_rules(config.kafka)
    if header.max_timestamp_ms > now_ms + rules.after_ms:
        raise Refused(
            e.INVALID_TIMESTAMP,
            f"timestamp {header.max_timestamp_ms} is more than {rules.after_ms} ms ahead of the broker's clock; "
            f"correct the clock of the producer, or raise {AFTER_MAX}",
        )
    if rules.before_ms is None:
        return
    for record in RecordReader(raw, config.record_bytes_max):
        if 0 <= record.timestamp_ms < now_ms - rules.before_ms:
            raise Refused(
                e.INVALID_TIMESTAMP,
                f"timestamp {record.timestamp_ms} is more than {rules.before_ms} ms behind the broker's clock; "
                f"{BEFORE_MAX} sets the limit",
            )


def _check_keys(raw: bytes, config: TopicConfig) -> None:
    """Refuse records without a key, which compaction would keep forever."""
    check_batch(raw)
    if any(record.key is None for record in RecordReader(raw, config.record_bytes_max)):
        raise Refused(e.INVALID_RECORD, "records of a compacted topic need keys, and a record has none")


def _checked(raw: bytes | Exception | None, version: int, size_bytes_max: int) -> KafkaHeader:
    """Return the header of a batch that may be appended. The append verifies the checksum."""
    if isinstance(raw, Exception):
        raise raw
    if not raw or len(raw) <= _MAGIC_AT:
        raise Refused(e.INVALID_RECORD, "the produce request has a partition without records")
    if raw[_MAGIC_AT] != MAGIC:
        # As Apache Kafka responds. Clients of versions before 3 know only UNSUPPORTED_FOR_MESSAGE_FORMAT.
        raise Refused(
            e.INVALID_RECORD if version >= BATCHES_SINCE else e.UNSUPPORTED_FOR_MESSAGE_FORMAT,
            f"unsupported record format {raw[_MAGIC_AT]}; use format {MAGIC} (Kafka clients 0.11 or later)",
        )
    if len(raw) < HEADER_BYTES:
        raise Refused(e.INVALID_RECORD, f"a record batch of {len(raw)} bytes is shorter than its header")
    header = read_header(raw)
    if header.size_bytes < len(raw) and header.batch_length > 0:
        raise Refused(e.INVALID_RECORD, "the produce request has several batches for one partition; send one")
    if len(raw) > size_bytes_max:
        raise Refused(e.MESSAGE_TOO_LARGE, f"a batch of {len(raw)} bytes exceeds max.message.bytes ({size_bytes_max})")
    if header.attributes & CONTROL:
        raise Refused(e.INVALID_RECORD, "clients must not produce control batches")
    if header.attributes & TRANSACTIONAL and header.producer_id < 0:
        raise Refused(e.INVALID_RECORD, "a transactional batch needs a producer id")
    if header.codec not in codecs.NAMES or (header.codec == codecs.ZSTD and version < ZSTD_SINCE):
        raise Refused(
            e.UNSUPPORTED_COMPRESSION_TYPE, f"compression type {header.codec} is not supported in Produce v{version}"
        )
    return header


class _Confirming:
    """The appended batches of a request that wait for their fsync."""

    __slots__ = ("_body", "_context", "_error", "_left", "_respond", "_waiting")

    def __init__(self, context: Context, body: Fields, waiting: list[Pending]) -> None:
        self._context = context
        self._body = body
        self._waiting = waiting
        self._left = 0
        self._error: BaseException | None = None
        self._respond: Respond | None = None

    def start(self, respond: Respond) -> None:
        self._respond = respond
        synced = [(engine, append) for _, engine, append, _ in self._waiting if append.durability is Durability.SYNCED]
        self._left = len(synced)
        for engine, append in synced:
            engine.call_when_confirmed(append, self._one)

    def _one(self, error: BaseException | None) -> None:
        """Callback of one append: durable, or failed. Runs in the loop; does not raise."""
        self._left -= 1
        if error is not None:
            self._error = error
        if self._left:
            return
        assert self._respond is not None, "confirmed before start"
        try:
            self._settle()
        except Exception as failure:
            self._respond(None, failure)
        else:
            self._respond(self._body, None)

    def _settle(self) -> None:
        error = self._error
        if error is None:
            _notify_appended(self._context, self._waiting)
            return
        if isinstance(error, StorageError):
            self._context.vhost.fail(error)
        for response, _, _, _ in self._waiting:
            response |= {"error_code": e.code_of(error), "error_message": str(error), "base_offset": -1}


def _notify_appended(context: Context, waiting: list[Pending]) -> None:
    for _, _, append, size_bytes in waiting:
        context.notify_appended(append.shard, size_bytes)
