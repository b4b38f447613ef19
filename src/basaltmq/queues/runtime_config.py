"""Runtime settings: a key-value table that never shows secrets (SPEC C14).

It holds throttles (`throttle.<key>` = rate,burst) and values that scripts read with `fila.get`. The rows are in the
family `state`. This module validates input, masks output and notifies watchers.

A value is secret if it was set as secret, or if its key contains a word such as password, secret, token or key. `get`,
`list` and errors show a mask instead. Passwords inside URLs are masked in every value. Scripts cannot read secrets,
because their results end up in messages. Throttles are numbers, and secret only if marked so.

Row:

    | flags u8: 1 secret | value UTF-8 |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from basaltmq.errors import CorruptionError, InvalidArgumentError, InvalidConfigError, LimitExceededError
from basaltmq.queues.throttle.token_buckets import Limit
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import queues as queue_keys

KEY_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 64 << 10
"""The largest value that a script can receive."""

LIST_MAX: Final = 10_000
"""Entries per answer; use `after` for the next ones."""

THROTTLE_PREFIX: Final = "throttle."
MASK: Final = "********"
DAMAGED: Final = "(damaged)"

_SECRET: Final = 1
_SECRET_WORD: Final = re.compile(
    "keys?|pass|pwd|private|auth|authorization|bearer|cookie|jwt|dsn|salt|signature|cert|pem", re.IGNORECASE
)
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_CONTAINED: Final = re.compile(r"secret|passw|passphrase|token|credential|apikey|privatekey|accesskey")
_URL_PASSWORD: Final = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,31}://)(?P<user>[^/?#\s:@]*):(?P<rest>[^/?#\s]*)@"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting with secrets masked."""

    key: str
    value: str
    is_secret: bool


@dataclass(frozen=True, slots=True)
class SettingsPage:
    """Settings of a prefix, and the total number with that prefix."""

    settings: tuple[Setting, ...]
    total: int


Watcher = Callable[[str, str | None], None]
"""Called with the key and the unmasked value (None: deleted) after the change is written."""


class RuntimeConfig:
    """The settings of a store. Not thread-safe: callers hold the plane's lock."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._watchers: list[tuple[str, Watcher]] = []

    def set(self, key: str, value: str, *, secret: bool = False) -> Setting:
        """Write a setting and return it masked. `secret` marks the key until it is deleted."""
        _check_key(key)
        raw = _checked_value(key, value)
        before = self._get(key)
        marked = secret or (before is not None and before[:1] != bytes((0,)))
        batch = Batch()
        batch.put(Family.STATE, queue_keys.state_key(key), bytes((_SECRET if marked else 0,)) + raw)
        self._store.write(batch)
        self._notify(key, value)
        return _shown(key, value, marked)

    def delete(self, key: str) -> bool:
        """Delete a setting. Return whether it existed."""
        _check_key(key)
        if self._get(key) is None:
            return False
        batch = Batch()
        batch.delete(Family.STATE, queue_keys.state_key(key))
        self._store.write(batch)
        self._notify(key, None)
        return True

    def get(self, key: str) -> Setting | None:
        """Return a setting with secrets masked; None if it does not exist."""
        _check_key(key)
        row = self._get(key)
        if row is None:
            return None
        marked, value = _decode(key, row)
        return _shown(key, value, marked)

    def for_scripts(self, key: str) -> str | None:
        """Return the value for `fila.get`; None if it is secret, because script results end up in messages."""
        row = self._get(key)
        if row is None:
            return None
        marked, value = _decode(key, row)
        return None if marked or is_secret_key(key) else value

    def list(self, prefix: str = "", *, limit: int = 1000, after: str | None = None) -> SettingsPage:
        """Return settings whose key starts with `prefix`, in key order after `after`. The total counts all of them."""
        if not isinstance(prefix, str):
            raise InvalidArgumentError(f"prefix must be text, not {type(prefix).__name__}")
        if type(limit) is not int or not 0 <= limit <= LIST_MAX:
            raise InvalidArgumentError(f"limit must be 0 to {LIST_MAX}, not {limit!r:.80}")
        settings: list[Setting] = []
        total = 0
        for key, row in self._rows(prefix):
            total += 1
            if len(settings) < limit and (after is None or key > after):
                settings.append(_shown_row(key, row))
        return SettingsPage(tuple(settings), total)

    def throttles(self, report: Callable[[str], None]) -> Iterator[tuple[str, Limit]]:
        """Yield all throttles as (throttle key, limit). Unreadable ones are passed to `report` and left out."""
        for key, row in self._rows(THROTTLE_PREFIX):
            try:
                limit = _limit(key, _decode(key, row)[1])
            except (CorruptionError, InvalidConfigError) as error:
                report(str(error))
            else:
                yield key[len(THROTTLE_PREFIX) :], limit

    def watch(self, prefix: str, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` after each change of a setting whose key starts with `prefix`. Return a function that stops
        it.

        If a watcher fails, the others are still called, and the first error is raised. The change is written by then.
        """
        entry = (prefix, watcher)
        self._watchers.append(entry)

        def unwatch() -> None:
            # Compare by identity, because the same watcher may be registered twice.
            self._watchers = [kept for kept in self._watchers if kept is not entry]

        return unwatch

    def _get(self, key: str) -> bytes | None:
        return self._store.get(Family.STATE, queue_keys.state_key(key))

    def _rows(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        start, end = key_parts.prefix_range(queue_keys.state_key(prefix))
        for key, row in self._store.scan(Family.STATE, start, end):
            # A key that is not text cannot have been set; it must not hide the other settings.
            with suppress(CorruptionError):
                yield queue_keys.decode_state_key(key), row

    def _notify(self, key: str, value: str | None) -> None:
        failure: Exception | None = None
        for prefix, watcher in list(self._watchers):
            if key.startswith(prefix):
                try:
                    watcher(key, value)
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise failure


def is_secret_key(key: str) -> bool:
    """Whether the key alone makes a value secret."""
    if key.startswith(THROTTLE_PREFIX):
        return False
    flat = re.sub(r"[^a-z]", "", key.lower())
    if _CONTAINED.search(flat):
        return True
    return any(_SECRET_WORD.fullmatch(word) for word in _WORD.findall(key))


def mask_urls(text: str) -> str:
    """Return the text with passwords in URLs masked."""
    return _URL_PASSWORD.sub(rf"\g<scheme>\g<user>:{MASK}@", text)


def _shown(key: str, value: str, marked: bool) -> Setting:
    if marked or is_secret_key(key):
        return Setting(key, MASK, True)
    return Setting(key, mask_urls(value), False)


def _shown_row(key: str, row: bytes) -> Setting:
    """Decode a row for display. A damaged row is shown as damaged and does not hide the others."""
    try:
        marked, value = _decode(key, row)
    except CorruptionError:
        return Setting(key, DAMAGED, True)
    return _shown(key, value, marked)


def _decode(key: str, row: bytes) -> tuple[bool, str]:
    if not row or row[0] > _SECRET:
        raise CorruptionError(f"the row of setting {key!r:.80} has unknown flags")
    try:
        return row[0] == _SECRET, row[1:].decode()
    except UnicodeDecodeError:
        raise CorruptionError(f"the value of setting {key!r:.80} is not text") from None


def _check_key(key: str) -> None:
    try:
        size = len(key.encode())
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgumentError(f"the key of a setting must be Unicode text, not {key!r:.80}") from None
    if not 1 <= size <= KEY_BYTES_MAX:
        raise LimitExceededError(f"the key of a setting must have 1 to {KEY_BYTES_MAX} bytes of UTF-8, not {size}")
    if not key.isprintable():
        raise InvalidArgumentError(f"the key of a setting must not contain control characters: {key!r:.80}")
    if key == THROTTLE_PREFIX:
        raise InvalidArgumentError(f"add the name of the throttle after {THROTTLE_PREFIX!r}, as in 'throttle.tenant-7'")


def _checked_value(key: str, value: str) -> bytes:
    """Return the value as bytes. Errors name the key but never the value, which may be secret."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"the value of setting {key!r:.80} must be text, not {type(value).__name__}")
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"the value of setting {key!r:.80} is not Unicode text") from None
    if len(raw) > VALUE_BYTES_MAX:
        raise LimitExceededError(
            f"the value of setting {key!r:.80} has {len(raw)} bytes and exceeds the limit of {VALUE_BYTES_MAX}"
        )
    if key.startswith(THROTTLE_PREFIX):
        _limit(key, value)
    return raw


def _limit(key: str, value: str) -> Limit:
    try:
        return Limit.parse(value)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{key!r:.80}: {error}") from None
