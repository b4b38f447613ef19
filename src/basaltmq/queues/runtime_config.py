"""Settings that change while the broker runs: a key-value table that never shows secrets (SPEC C14).

Throttles (`throttle.<key>` = rate,burst) live here, and whatever operators want scripts to read with `fila.get`. The
rows are kept by somebody else, behind `StateStore`; this module checks what goes in, masks what comes out, and tells
watchers.

Secrets: a value is secret when it was set as secret, or when its key has a word such as password, secret, token or key
in it. What people see (`get`, `list`, errors) has a mask in place of such a value; passwords inside URLs are masked in
every value. Scripts do not get secrets at all: what they return ends up in messages. `reveal` is for code that needs
the value to do its work, and is the only way to it. Throttles are numbers, and secret only when marked so.

Row:

    | flags u8: 1 secret | value UTF-8 |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from basaltmq.errors import CorruptionError, InvalidArgumentError, InvalidConfigError, LimitExceededError
from basaltmq.queues.throttle.token_buckets import Limit

KEY_BYTES_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 64 << 10
"""What a script can be given in one piece."""

LIST_MAX: Final = 10_000
"""Entries in one answer; ask with `after` for more."""

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


class StateStore(Protocol):
    """Where the rows are; ordered by key."""

    def get_state(self, name: str) -> bytes | None: ...

    def put_state(self, name: str, value: bytes) -> None: ...

    def delete_state(self, name: str) -> None: ...

    def list_state(self, prefix: str = "") -> Iterator[tuple[str, bytes]]: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting as it may be shown."""

    key: str
    value: str
    is_secret: bool


@dataclass(frozen=True, slots=True)
class SettingsPage:
    """Some settings of a prefix, and how many there are of it in all."""

    settings: tuple[Setting, ...]
    total: int


Watcher = Callable[[str, str | None], None]
"""Called with the key and its value (unmasked; None: deleted) after the change is written."""


class RuntimeConfig:
    """The settings of a store. Not thread-safe: the caller holds its plane's lock."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._watchers: list[tuple[str, Watcher]] = []

    def set(self, key: str, value: str, *, secret: bool = False) -> Setting:
        """Write a setting; what may be shown of it. `secret` marks the value for as long as it is there."""
        _check_key(key)
        raw = _checked_value(key, value)
        before = self._store.get_state(key)
        marked = secret or (before is not None and before[:1] != bytes((0,)))
        self._store.put_state(key, bytes((_SECRET if marked else 0,)) + raw)
        self._tell(key, value)
        return _shown(key, value, marked)

    def delete(self, key: str) -> bool:
        """Whether there was such a setting."""
        _check_key(key)
        if self._store.get_state(key) is None:
            return False
        self._store.delete_state(key)
        self._tell(key, None)
        return True

    def get(self, key: str) -> Setting | None:
        """A setting as it may be shown."""
        _check_key(key)
        row = self._store.get_state(key)
        if row is None:
            return None
        marked, value = _decode(key, row)
        return _shown(key, value, marked)

    def reveal(self, key: str) -> str | None:
        """The value itself, for code that works with it. Never log, list or return it to a client."""
        row = self._store.get_state(key)
        return None if row is None else _decode(key, row)[1]

    def for_scripts(self, key: str) -> str | None:
        """The value for `fila.get`: none of a secret one, which has no place in a message."""
        row = self._store.get_state(key)
        if row is None:
            return None
        marked, value = _decode(key, row)
        return None if marked or is_secret_key(key) else value

    def list(self, prefix: str = "", *, limit: int = 1000, after: str | None = None) -> SettingsPage:
        """Settings whose key begins with `prefix`, in key order, beginning behind `after`; the total is of all."""
        if not isinstance(prefix, str):
            raise InvalidArgumentError(f"a prefix is text, not {type(prefix).__name__}")
        if type(limit) is not int or not 0 <= limit <= LIST_MAX:
            raise InvalidArgumentError(f"the limit of a list is 0 to {LIST_MAX}, not {limit!r:.80}")
        settings: list[Setting] = []
        total = 0
        for key, row in self._store.list_state(prefix):
            total += 1
            if len(settings) < limit and (after is None or key > after):
                settings.append(_shown_row(key, row))
        return SettingsPage(tuple(settings), total)

    def throttles(self, report: Callable[[str], None]) -> Iterator[tuple[str, Limit]]:
        """All throttles as (throttle key, limit). One that cannot be read is reported by name and left out."""
        for key, row in self._store.list_state(THROTTLE_PREFIX):
            try:
                limit = _limit(key, _decode(key, row)[1])
            except (CorruptionError, InvalidConfigError) as error:
                report(str(error))
            else:
                yield key[len(THROTTLE_PREFIX) :], limit

    def watch(self, prefix: str, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` after each change of a setting whose key begins with `prefix`; the answer ends it.

        All watchers are told of a change even when one of them fails; the first failure is then raised. The change is
        written by then.
        """
        entry = (prefix, watcher)
        self._watchers.append(entry)

        def unwatch() -> None:
            # By identity: the same watcher may watch twice.
            self._watchers = [kept for kept in self._watchers if kept is not entry]

        return unwatch

    def _tell(self, key: str, value: str | None) -> None:
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
    """Whether the name alone makes a value secret."""
    if key.startswith(THROTTLE_PREFIX):
        return False
    flat = re.sub(r"[^a-z]", "", key.lower())
    if _CONTAINED.search(flat):
        return True
    return any(_SECRET_WORD.fullmatch(word) for word in _WORD.findall(key))


def mask_urls(text: str) -> str:
    """The text with the passwords of URLs in it masked."""
    return _URL_PASSWORD.sub(rf"\g<scheme>\g<user>:{MASK}@", text)


def _shown(key: str, value: str, marked: bool) -> Setting:
    if marked or is_secret_key(key):
        return Setting(key, MASK, True)
    return Setting(key, mask_urls(value), False)


def _shown_row(key: str, row: bytes) -> Setting:
    """One damaged row does not hide the others."""
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
        raise InvalidArgumentError(f"the key of a setting is Unicode text, not {key!r:.80}") from None
    if not 1 <= size <= KEY_BYTES_MAX:
        raise LimitExceededError(f"the key of a setting has 1 to {KEY_BYTES_MAX} bytes of UTF-8, not {size}")
    if not key.isprintable():
        raise InvalidArgumentError(f"the key of a setting has no control characters: {key!r:.80}")
    if key == THROTTLE_PREFIX:
        raise InvalidArgumentError(f"name the throttle behind {THROTTLE_PREFIX!r}, as in 'throttle.tenant-7'")


def _checked_value(key: str, value: str) -> bytes:
    """The value as bytes. Errors name the key and never the value, which may be a secret."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"the value of setting {key!r:.80} is text, not {type(value).__name__}")
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"the value of setting {key!r:.80} is not Unicode text") from None
    if len(raw) > VALUE_BYTES_MAX:
        raise LimitExceededError(
            f"the value of setting {key!r:.80} has {len(raw)} bytes, over the limit of {VALUE_BYTES_MAX}"
        )
    if key.startswith(THROTTLE_PREFIX):
        _limit(key, value)
    return raw


def _limit(key: str, value: str) -> Limit:
    try:
        return Limit.parse(value)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{key!r:.80}: {error}") from None
