"""The configuration of a queue (SPEC C4, limits of E7) and its row.

    | layout u8 | MessagePack map of the fields that differ from their defaults |

Unknown fields are an error. Ignoring one would lose it when the row is written back.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, TypedDict

import msgspec

from basaltmq.decoding import converter, msgpack_decoder
from basaltmq.durability import Durability
from basaltmq.errors import BasaltError, CorruptionError, InvalidConfigError
from basaltmq.queues.message import check_queue_name

LAYOUT: Final = 2

VISIBILITY_TIMEOUT_MS_DEFAULT: Final = 30_000
"""Long enough for most work, short enough to detect a lost consumer soon."""

DURATION_MS_MAX: Final = 100 * 365 * 24 * 3600 * 1000
"""100 years: added to any current time, it still fits the nanoseconds of a key."""

SCRIPT_BYTES_MAX: Final = 64 << 10
"""The sandbox's limit (`lua.SOURCE_BYTES_MAX`), because scripts are compiled when a queue is loaded."""

EXTRA_BYTES_MAX: Final = 1 << 20
"""Arguments of a declaration arrive in one protocol frame."""

COUNT_MAX: Final = (1 << 63) - 1

ATTEMPTS_MAX_DEFAULT: Final = 20
"""Default attempts for queues created by programs: about an hour of failures with the backoff of workers."""

DEAD_LETTERS: Final = ".dlq"
"""Name suffix of dead-letter queues that are created by default."""


class Overflow(enum.Enum):
    """What to do with a publish beyond `length_max` or `bytes_max`."""

    DROP_HEAD = "drop-head"
    REJECT_PUBLISH = "reject-publish"
    REJECT_PUBLISH_DEAD_LETTER = "reject-publish-dlx"


class QueueConfig(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a queue behaves. None means no limit."""

    name: str
    on_enqueue_script: str | None = None
    on_failure_script: str | None = None
    visibility_timeout_ms: int = VISIBILITY_TIMEOUT_MS_DEFAULT
    dead_letter_queue: str | None = None
    attempts_max: int | None = None
    """Deliveries before a message is dead-lettered or dropped."""
    ttl_ms: int | None = None
    """Time to live of a message, in milliseconds."""
    length_max: int | None = None
    bytes_max: int | None = None
    overflow: Overflow = Overflow.DROP_HEAD
    expires_ms: int | None = None
    """Delete the queue after this many milliseconds without use."""
    priorities_max: int = 0
    """Highest priority of the queue. 0 means no priorities."""
    durability: Durability = Durability.SYNCED
    dedup_window_ms: int | None = None
    """How long to remember the deduplication id of a publisher, in milliseconds."""
    delivery_limit: int | None = None
    """Returns of any kind before a message is dead-lettered or dropped."""
    parks_failed: bool = False
    """Without a dead-letter queue, move messages that used up their attempts to `<name>.dlq` instead of dropping them.
    """
    extra: bytes = b""
    """Data of the layer above about this queue; opaque here."""

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        if self.dead_letter_queue is not None:
            _check_name("dead_letter_queue", self.dead_letter_queue)
            if self.dead_letter_queue == self.name:
                raise InvalidConfigError(f"queue {self.name!r} cannot be its own dead-letter queue")
        for field, low, high in _RANGES:
            value = getattr(self, field)
            if value is not None and (type(value) is not int or not low <= value <= high):
                raise InvalidConfigError(f"{field} of queue {self.name!r} must be {low} to {high}, not {value!r:.80}")
        for field in ("on_enqueue_script", "on_failure_script"):
            self._check_script(field, getattr(self, field))
        if not isinstance(self.extra, bytes) or len(self.extra) > EXTRA_BYTES_MAX:
            raise InvalidConfigError(f"extra of queue {self.name!r} must be at most {EXTRA_BYTES_MAX} bytes")
        if type(self.parks_failed) is not bool:
            raise InvalidConfigError(f"parks_failed of queue {self.name!r} must be true or false")
        if not isinstance(self.overflow, Overflow) or not isinstance(self.durability, Durability):
            raise InvalidConfigError(f"overflow or durability of queue {self.name!r} has an unknown value")
        # A non-empty `extra` means that the layer above may route dead letters itself.
        has_target = self.dead_letter_queue is not None or self.extra
        if self.overflow is Overflow.REJECT_PUBLISH_DEAD_LETTER and not has_target:
            raise InvalidConfigError(
                f"queue {self.name!r} rejects to a dead-letter queue but names none; set dead_letter_queue"
            )

    def _check_script(self, field: str, script: object) -> None:
        if script is None:
            return
        if not isinstance(script, str):
            raise InvalidConfigError(f"{field} of queue {self.name!r} must be text, not {type(script).__name__}")
        if len(script.encode(errors="surrogatepass")) > SCRIPT_BYTES_MAX:
            raise InvalidConfigError(f"{field} of queue {self.name!r} exceeds the limit of {SCRIPT_BYTES_MAX} bytes")


_RANGES: Final = (
    ("visibility_timeout_ms", 1, DURATION_MS_MAX),
    ("attempts_max", 1, (1 << 32) - 1),
    ("ttl_ms", 0, DURATION_MS_MAX),
    ("length_max", 0, COUNT_MAX),
    ("bytes_max", 0, COUNT_MAX),
    ("expires_ms", 1, DURATION_MS_MAX),
    ("priorities_max", 0, 255),
    ("dedup_window_ms", 1, DURATION_MS_MAX),
    ("delivery_limit", 0, (1 << 32) - 1),
)


def _check_name(field: str, name: str) -> None:
    try:
        check_queue_name(name)
    except BasaltError as error:
        raise InvalidConfigError(f"{field} of a queue: {error}") from None


queue_config: Final = converter(QueueConfig)
"""Converts plain values to a configuration."""

_decode: Final = msgpack_decoder(QueueConfig)


class QueueSettings(TypedDict, total=False):
    """Settings of a queue as programs pass them, embedded or to a broker. See `QueueConfig`."""

    on_enqueue_script: str | None
    on_failure_script: str | None
    visibility_timeout_ms: int
    dead_letter_queue: str | None
    attempts_max: int | None
    ttl_ms: int | None
    length_max: int | None
    bytes_max: int | None
    overflow: Overflow | str
    expires_ms: int | None
    priorities_max: int
    durability: Durability | str
    dedup_window_ms: int | None
    delivery_limit: int | None
    parks_failed: bool


def new_config(name: str, given: Mapping[str, Any]) -> QueueConfig:
    """Return the configuration of a queue that a program creates for its workers.

    Unless `attempts_max` is given, a message gets `ATTEMPTS_MAX_DEFAULT` attempts and then moves to `<name>.dlq`. 0 or
    None means no limit.
    """
    settings = dict(given)
    if "attempts_max" not in settings:
        settings["attempts_max"] = ATTEMPTS_MAX_DEFAULT
        settings.setdefault("parks_failed", True)
    elif settings["attempts_max"] == 0:
        settings["attempts_max"] = None
    try:
        return queue_config(msgspec.to_builtins(settings) | {"name": name})
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidConfigError(f"queue {name!r}: {error}") from error


def encode_config(config: QueueConfig) -> bytes:
    return bytes((LAYOUT,)) + msgspec.msgpack.encode(config)


def decode_config(name: str, row: bytes) -> QueueConfig:
    if row[:1] != bytes((LAYOUT,)):
        raise CorruptionError(f"the configuration of queue {name!r} has an unknown layout: {row[:1].hex() or 'empty'}")
    try:
        config = _decode(memoryview(row)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidConfigError) as error:
        raise CorruptionError(f"the configuration of queue {name!r} is damaged: {error}") from None
    if config.name != name:
        raise CorruptionError(f"the configuration row of queue {name!r} contains the name {config.name!r}")
    return config


def default_row(key: bytes) -> bytes | None:
    """Return the default row for a queue whose own row cannot be read; None if the key is not a queue name.

    Its dead-letter queue is unknown, so dead letters go to `<name>.dlq` instead of being dropped.
    """
    try:
        name = key.decode()
        plain = QueueConfig(name=name)
    except (UnicodeDecodeError, InvalidConfigError):
        return None
    if name.endswith(DEAD_LETTERS):
        return encode_config(plain)
    try:
        return encode_config(QueueConfig(name=name, dead_letter_queue=name + DEAD_LETTERS))
    except InvalidConfigError:
        return encode_config(plain)
