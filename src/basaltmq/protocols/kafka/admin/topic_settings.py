"""Topic settings under their Kafka names: all that Apache Kafka 4.1 knows, and Basalt's own.

A setting is in one of three groups:

- It has a field of `TopicConfig`, such as retention.ms.
- It applies only to Kafka producers, such as compression.type. `TopicConfig.kafka` stores it as text.
- It has no effect, because it concerns segment files or replicas of Apache Kafka. It is checked and stored in
  `TopicConfig.kafka` too, so that tools read back what they wrote.

Unknown settings are refused, so that no client relies on a setting that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec

from basaltmq.durability import Durability, parse_durability
from basaltmq.errors import InvalidConfigError
from basaltmq.log.batches import codecs
from basaltmq.streams.topics import TopicConfig

BOOLEAN: Final = 1
STRING: Final = 2
INT: Final = 3
LONG: Final = 5
DOUBLE: Final = 6
LIST: Final = 7
"""Types, as DescribeConfigs numbers them."""

LONG_MAX: Final = (1 << 63) - 1
INT_MAX: Final = (1 << 31) - 1
HOUR_MS: Final = 3_600_000
TEXT_CHARS_MAX: Final = 1024
"""Length of a value in `TopicConfig.kafka`."""

LOG_APPEND_TIME: Final = "LogAppendTime"
PRODUCER: Final = "producer"
"""The compression.type that keeps the codec of the producer."""

UNCOMPRESSED: Final = "uncompressed"

DURABILITY: Final = "basalt.durability"
AFTER_MAX: Final = "message.timestamp.after.max.ms"
BEFORE_MAX: Final = "message.timestamp.before.max.ms"
COMPRESSION: Final = "compression.type"


_CODECS: Final = {name: codec for codec, name in codecs.NAMES.items() if codec != codecs.NONE} | {
    UNCOMPRESSED: codecs.NONE
}


class Setting(NamedTuple):
    """A topic setting."""

    type: int
    default: str
    check: Callable[[str, str], str]
    """Returns the value in its usual form, or raises InvalidConfigError."""
    documentation: str
    broker_name: str = ""
    """The broker setting that Apache Kafka takes the default from."""


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InvalidConfigError(f"{name} must be a number, not {value!r:.80}") from None


def _from(least: int, most: int = LONG_MAX) -> Callable[[str, str], str]:
    def check(name: str, value: str) -> str:
        number = _number(name, value)
        if not least <= number <= most:
            raise InvalidConfigError(f"{name} must be {least} to {most}, not {number}")
        return str(number)

    return check


def _ratio(name: str, value: str) -> str:
    try:
        number = float(value)
    except ValueError:
        raise InvalidConfigError(f"{name} must be a number, not {value!r:.80}") from None
    if not 0 <= number <= 1:
        raise InvalidConfigError(f"{name} must be 0 to 1, not {value:.80}")
    return str(number)


def _one_of(*valid: str) -> Callable[[str, str], str]:
    def check(name: str, value: str) -> str:
        if value not in valid:
            raise InvalidConfigError(f"{name} must be {' or '.join(valid)}, not {value!r:.80}")
        return value

    return check


def _boolean(name: str, value: str) -> str:
    return _one_of("true", "false")(name, value.lower())


def _off(name: str, value: str) -> str:
    if _boolean(name, value) == "true":
        raise InvalidConfigError(f"{name} must be false: Basalt has no remote log storage")
    return "false"


def _policy(name: str, value: str) -> str:
    chosen = items_of(value)
    if not chosen or set(chosen) - {"delete", "compact"}:
        raise InvalidConfigError(f"{name} must be delete, compact or both, not {value!r:.80}")
    return ",".join(sorted(set(chosen)))


def _replicas(name: str, value: str) -> str:
    for item in items_of(value):
        partition, _, replica = item.partition(":")
        if item != "*" and not (partition.isdecimal() and replica.isdecimal()):
            raise InvalidConfigError(f"{name} must be * or a list of partition:replica, not {value!r:.80}")
    return value


def _durability(name: str, value: str) -> str:
    return parse_durability(value).value


def items_of(value: str) -> list[str]:
    """Return the items of a list setting."""
    return [item.strip() for item in value.split(",") if item.strip()]


_REPLICATION: Final = "Apache Kafka's replication. No effect."
_FILES: Final = "Apache Kafka's segment files. No effect: Basalt's log has segments of its own."
_REMOTE: Final = "Apache Kafka's tiered storage. No effect."

_WITHOUT_LIMIT: Final = str(LONG_MAX)

SETTINGS: Final[dict[str, Setting]] = {
    "cleanup.policy": Setting(
        LIST,
        "delete",
        _policy,
        "delete removes records by retention. compact keeps the latest record of each key. Both may be combined.",
        "log.cleanup.policy",
    ),
    "compression.gzip.level": Setting(
        INT, "-1", _from(-1, 9), "Level of gzip when the broker compresses.", "compression.gzip.level"
    ),
    "compression.lz4.level": Setting(
        INT, "9", _from(1, 17), "Level of lz4. No effect: the broker uses one level.", "compression.lz4.level"
    ),
    COMPRESSION: Setting(
        STRING,
        PRODUCER,
        _one_of(PRODUCER, *_CODECS),
        "Compression of stored batches. producer keeps what the producer chose; otherwise the broker compresses again.",
        "compression.type",
    ),
    "compression.zstd.level": Setting(
        INT, "3", _from(-131_072, 22), "Level of zstd when the broker compresses.", "compression.zstd.level"
    ),
    "delete.retention.ms": Setting(
        LONG,
        str(TopicConfig().tombstone_retention_ms),
        _from(0),
        "How long compaction keeps a record without value, so that consumers see the deletion.",
        "log.cleaner.delete.retention.ms",
    ),
    "file.delete.delay.ms": Setting(LONG, "60000", _from(0), _FILES, "log.segment.delete.delay.ms"),
    "flush.messages": Setting(
        LONG, _WITHOUT_LIMIT, _from(1), f"No effect: {DURABILITY} sets what is synced.", "log.flush.interval.messages"
    ),
    "flush.ms": Setting(
        LONG, _WITHOUT_LIMIT, _from(0), f"No effect: {DURABILITY} sets what is synced.", "log.flush.interval.ms"
    ),
    "follower.replication.throttled.replicas": Setting(LIST, "", _replicas, _REPLICATION, ""),
    "index.interval.bytes": Setting(INT, "4096", _from(0, INT_MAX), _FILES, "log.index.interval.bytes"),
    "leader.replication.throttled.replicas": Setting(LIST, "", _replicas, _REPLICATION, ""),
    "local.retention.bytes": Setting(LONG, "-2", _from(-2), _REMOTE, "log.local.retention.bytes"),
    "local.retention.ms": Setting(LONG, "-2", _from(-2), _REMOTE, "log.local.retention.ms"),
    "max.compaction.lag.ms": Setting(
        LONG,
        _WITHOUT_LIMIT,
        _from(1),
        "No effect: Basalt compacts a partition once enough of it is obsolete.",
        "log.cleaner.max.compaction.lag.ms",
    ),
    "max.message.bytes": Setting(
        INT,
        str(TopicConfig().record_bytes_max),
        _from(0, INT_MAX),
        "Largest batch, as sent. A record may have this size when decompressed.",
        "message.max.bytes",
    ),
    AFTER_MAX: Setting(
        LONG,
        str(HOUR_MS),
        _from(0),
        "How far timestamps of records may be ahead of the broker's clock.",
        "log.message.timestamp.after.max.ms",
    ),
    BEFORE_MAX: Setting(
        LONG,
        _WITHOUT_LIMIT,
        _from(0),
        "How far timestamps of records may be behind the broker's clock.",
        "log.message.timestamp.before.max.ms",
    ),
    "message.timestamp.type": Setting(
        STRING,
        "CreateTime",
        _one_of("CreateTime", LOG_APPEND_TIME),
        "Timestamps of records: those of the producer, or the broker's time of the append.",
        "log.message.timestamp.type",
    ),
    "min.cleanable.dirty.ratio": Setting(
        DOUBLE, "0.5", _ratio, "No effect: Basalt has its own rule for compaction.", "log.cleaner.min.cleanable.ratio"
    ),
    "min.compaction.lag.ms": Setting(
        LONG,
        "0",
        _from(0),
        "No effect: Basalt compacts a partition once enough of it is obsolete.",
        "log.cleaner.min.compaction.lag.ms",
    ),
    "min.insync.replicas": Setting(INT, "1", _from(1, INT_MAX), _REPLICATION, "min.insync.replicas"),
    "preallocate": Setting(BOOLEAN, "false", _boolean, _FILES, "log.preallocate"),
    "remote.log.copy.disable": Setting(BOOLEAN, "false", _boolean, _REMOTE, ""),
    "remote.log.delete.on.disable": Setting(BOOLEAN, "false", _boolean, _REMOTE, ""),
    "remote.storage.enable": Setting(BOOLEAN, "false", _off, _REMOTE, ""),
    "retention.bytes": Setting(
        LONG,
        "-1",
        _from(-1),
        "Size of a partition above which its oldest records are deleted. -1: no limit.",
        "log.retention.bytes",
    ),
    "retention.ms": Setting(
        LONG, "-1", _from(-1), "Age above which records are deleted. -1: no limit.", "log.retention.ms"
    ),
    "segment.bytes": Setting(INT, "1073741824", _from(14, INT_MAX), _FILES, "log.segment.bytes"),
    "segment.index.bytes": Setting(INT, "10485760", _from(4, INT_MAX), _FILES, "log.index.size.max.bytes"),
    "segment.jitter.ms": Setting(LONG, "0", _from(0), _FILES, "log.roll.jitter.ms"),
    "segment.ms": Setting(LONG, "604800000", _from(1), _FILES, "log.roll.ms"),
    "unclean.leader.election.enable": Setting(
        BOOLEAN, "false", _boolean, _REPLICATION, "unclean.leader.election.enable"
    ),
    DURABILITY: Setting(
        STRING,
        Durability.SYNCED.value,
        _durability,
        "What acks=all waits for: memory, written (survives a crash of the process) or synced (after the fsync).",
        "kafka.durability",
    ),
}


def _limit(value: str) -> int | None:
    return None if value == "-1" else int(value)


def _limit_text(limit: int | None) -> str:
    return "-1" if limit is None else str(limit)


def _policy_of(config: TopicConfig) -> str:
    if not config.compact:
        return "delete"
    return "compact" if config.compact_only else "compact,delete"


class _Mapped(NamedTuple):
    """A setting with a field of `TopicConfig`."""

    fields: Callable[[str], dict[str, Any]]
    text: Callable[[TopicConfig], str]


_MAPPED: Final[dict[str, _Mapped]] = {
    "cleanup.policy": _Mapped(
        lambda value: {"compact": "compact" in value, "compact_only": value == "compact"}, _policy_of
    ),
    "delete.retention.ms": _Mapped(
        lambda value: {"tombstone_retention_ms": int(value)}, lambda config: str(config.tombstone_retention_ms)
    ),
    "max.message.bytes": _Mapped(
        lambda value: {"record_bytes_max": int(value)}, lambda config: str(config.record_bytes_max)
    ),
    "message.timestamp.type": _Mapped(
        lambda value: {"append_time": value == LOG_APPEND_TIME},
        lambda config: LOG_APPEND_TIME if config.append_time else "CreateTime",
    ),
    "retention.bytes": _Mapped(
        lambda value: {"retention_bytes": _limit(value)}, lambda config: _limit_text(config.retention_bytes)
    ),
    "retention.ms": _Mapped(
        lambda value: {"retention_ms": _limit(value)}, lambda config: _limit_text(config.retention_ms)
    ),
    DURABILITY: _Mapped(lambda value: {"durability": parse_durability(value)}, lambda config: config.level.value),
}


def default_of(name: str, durability: Durability) -> str:
    """Return the default of a setting. `durability` is that of the listener."""
    return durability.value if name == DURABILITY else SETTINGS[name].default


def value_of(config: TopicConfig, name: str) -> str:
    """Return the value that a setting has in a topic."""
    mapped = _MAPPED.get(name)
    if mapped is not None:
        return mapped.text(config)
    return dict(config.kafka).get(name, SETTINGS[name].default)


def changed(config: TopicConfig, name: str, value: str | None, durability: Durability) -> TopicConfig:
    """Return a config with one setting changed, or, with None, at its default."""
    setting = SETTINGS.get(name)
    if setting is None:
        raise InvalidConfigError(f"unknown topic config {name!r:.80}; valid configs: {', '.join(sorted(SETTINGS))}")
    default = default_of(name, durability)
    value = default if value is None else setting.check(name, value)
    if name in _MAPPED:
        return msgspec.structs.replace(config, **_MAPPED[name].fields(value))
    if len(value) > TEXT_CHARS_MAX:
        raise InvalidConfigError(f"{name} has {len(value)} characters; the limit is {TEXT_CHARS_MAX}")
    kept = dict(config.kafka)
    kept.pop(name, None)
    if value != default:
        kept[name] = value
    return msgspec.structs.replace(config, kafka=tuple(sorted(kept.items())))


class ProducerRules(NamedTuple):
    """What applies to the batches of Kafka producers."""

    codec: int | None
    """Codec of stored batches; None keeps the producer's."""
    level: int | None
    """Level of the codec; None is its default."""
    after_ms: int
    before_ms: int | None
    """How far timestamps may be from the broker's clock; None means no limit."""


@lru_cache(maxsize=1024)
def producer_rules(kafka: tuple[tuple[str, str], ...]) -> ProducerRules:
    """Return the rules in `TopicConfig.kafka`."""
    values = dict(kafka)
    name = values.get(COMPRESSION, PRODUCER)
    level = values.get(f"compression.{name}.level")
    before = values.get(BEFORE_MAX)
    return ProducerRules(
        None if name == PRODUCER else _CODECS[name],
        None if level is None else int(level),
        int(values.get(AFTER_MAX, HOUR_MS)),
        None if before is None else int(before),
    )


def topic_config(given: Iterable[tuple[str, str | None]], partitions: int, durability: Durability) -> TopicConfig:
    """Return the config of a topic created over Kafka.

    Keys are indexed only for compaction, because otherwise produced batches need no decoding.
    """
    config = TopicConfig(partitions=partitions, durability=durability, index_keys=False, index_tags=False)
    for name, value in given:
        if value is None:
            raise InvalidConfigError(f"{name} has no value; omit it to use the default")
        config = changed(config, name, value, durability)
    return msgspec.structs.replace(config, index_keys=True) if config.compact else config
