"""API keys and their permissions: authentication for the gRPC services.

The text of a key is shown once, when the key is created:

    fila_<key id, 16 hex digits>_<43 characters of 32 random bytes>

The store holds only its SHA-256. A slow hash protects passwords that people choose; 256 random bits cannot be guessed.

Row, by key id:

    | layout u8 | MessagePack map: name, digest (32), created ms, expires ms (0: never), superadmin, permissions |

A permission is a kind and a pattern of queue names, in which `*` matches any number of characters:

    produce   enqueue           consume   consume and acknowledge           admin   create, delete, inspect, redrive

Superadmins may do everything. A key without permissions may do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from basaltmq.decoding import msgpack_decoder
from basaltmq.errors import (
    AuthenticationError,
    CorruptionError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
)
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.broker import api_key_key, decode_api_key_key

LAYOUT: Final = 1
KEYS_MAX: Final = 100_000
"""All keys are in memory, at about 500 bytes each."""

NAME_CHARACTERS_MAX: Final = 256
PERMISSIONS_MAX: Final = 1_000
PATTERN_CHARACTERS_MAX: Final = 255
"""The length limit of a queue name."""

VERDICTS_MAX: Final = 4_096
"""Cached permission checks per key."""

_TEXT: Final = re.compile(r"fila_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")

Kind = Literal["produce", "consume", "admin"]
KINDS: Final[tuple[Kind, ...]] = ("produce", "consume", "admin")


class Permission(msgspec.Struct, frozen=True):
    """Allows one kind of access to the queues whose names match the pattern."""

    kind: Kind
    pattern: str


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    digest: bytes
    created_ms: int
    expires_ms: int
    is_superadmin: bool
    permissions: tuple[Permission, ...] = ()


class ApiKey:
    """A key without its secret text."""

    __slots__ = ("_verdicts", "id", "row")

    def __init__(self, key_id: str, row: _Row) -> None:
        self.id = key_id
        self.row = row
        self._verdicts: dict[tuple[str, str], bool] = {}

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def is_superadmin(self) -> bool:
        return self.row.is_superadmin

    @property
    def permissions(self) -> tuple[Permission, ...]:
        return self.row.permissions

    def may(self, kind: Kind, queue: str) -> bool:
        if self.row.is_superadmin:
            return True
        verdict = self._verdicts.get((kind, queue))
        if verdict is None:
            verdict = any(each.kind == kind and matches(each.pattern, queue) for each in self.row.permissions)
            if len(self._verdicts) >= VERDICTS_MAX:
                self._verdicts.clear()
            self._verdicts[kind, queue] = verdict
        return verdict

    def may_everywhere(self, kind: Kind) -> bool:
        """Whether the key has this permission for every queue name."""
        return self.row.is_superadmin or any(
            each.kind == kind and not each.pattern.strip("*") for each in self.row.permissions
        )

    def has_expired(self, now_ms: int) -> bool:
        return bool(self.row.expires_ms) and self.row.expires_ms <= now_ms


def matches(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern. Takes time linear in both."""
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    if not name.startswith(first):
        return False
    at = len(first)
    for piece in rest[:-1]:
        at = name.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return len(name) - at >= len(rest[-1]) and name.endswith(rest[-1])


class ApiKeys:
    """The API keys of a store. Changes are written at once; the caller waits for their sync."""

    def __init__(
        self,
        store: Store,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._store = store
        self._clock_ns = clock_ns
        self._random_bytes = random_bytes
        self._keys: dict[str, ApiKey] = {}
        for raw, row in store.scan(Family.API_KEYS):
            key_id = decode_api_key_key(raw)
            self._keys[key_id] = ApiKey(key_id, _decode(key_id, row))
        self._watchers: list[Callable[[], None]] = []

    def watch(self, watcher: Callable[[], None]) -> None:
        """Register a callback for when a key may have lost permissions."""
        self._watchers.append(watcher)

    def create(self, name: str, *, expires_ms: int = 0, is_superadmin: bool = False) -> tuple[ApiKey, str]:
        """Create a key. Return it with its text, which cannot be retrieved again."""
        if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
            raise InvalidArgumentError(f"an API key's name must have 1 to {NAME_CHARACTERS_MAX} printable characters")
        now_ms = self._now_ms()
        if expires_ms and expires_ms <= now_ms:
            raise InvalidArgumentError(f"the expiry time {expires_ms} ms is not after the current time {now_ms} ms")
        if len(self._keys) >= KEYS_MAX:
            raise LimitExceededError(f"the limit of {KEYS_MAX} API keys is reached; revoke some first")
        key_id = self._random_bytes(8).hex()
        secret = base64.urlsafe_b64encode(self._random_bytes(32)).rstrip(b"=").decode()
        text = f"fila_{key_id}_{secret}"
        row = _Row(name, _digest(text), now_ms, expires_ms, is_superadmin)
        return self._put(key_id, row), text

    def revoke(self, key_id: str) -> None:
        self.get(key_id)
        batch = Batch()
        batch.delete(Family.API_KEYS, api_key_key(key_id))
        self._store.write(batch)
        del self._keys[key_id]
        self._notify()

    def get(self, key_id: str) -> ApiKey:
        found = self._keys.get(key_id)
        if found is None:
            raise NotFoundError(f"there is no API key {key_id!r:.80}")
        return found

    def all(self) -> list[ApiKey]:
        return sorted(self._keys.values(), key=lambda key: (key.row.created_ms, key.id))

    def permit(self, key_id: str, permissions: Sequence[tuple[str, str]]) -> ApiKey:
        """Replace the permissions of a key."""
        before = self.get(key_id).row
        if len(permissions) > PERMISSIONS_MAX:
            raise LimitExceededError(f"{len(permissions)} permissions exceed the limit of {PERMISSIONS_MAX} per key")
        key = self._put(key_id, msgspec.structs.replace(before, permissions=tuple(map(_permission, permissions))))
        self._notify()
        return key

    def authenticate(self, text: str) -> ApiKey:
        """Return the key with this text. The AuthenticationError does not reveal why a text is invalid."""
        form = _TEXT.fullmatch(text)
        key = None if form is None else self._keys.get(form[1])
        if key is None or not hmac.compare_digest(key.row.digest, _digest(text)):
            raise AuthenticationError("the API key is unknown or was revoked")
        self.require_current(key)
        return key

    def require_current(self, key: ApiKey) -> ApiKey:
        """Return the current state of a key. Raise AuthenticationError if it was revoked or has expired."""
        current = self._keys.get(key.id)
        if current is None:
            raise AuthenticationError(f"API key {key.id} was revoked")
        if current.has_expired(self._now_ms()):
            raise AuthenticationError(f"API key {key.id} has expired; create another")
        return current

    def _put(self, key_id: str, row: _Row) -> ApiKey:
        batch = Batch()
        batch.put(Family.API_KEYS, api_key_key(key_id), bytes((LAYOUT,)) + msgspec.msgpack.encode(row))
        self._store.write(batch)
        key = self._keys[key_id] = ApiKey(key_id, row)
        return key

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()

    def _now_ms(self) -> int:
        return self._clock_ns() // 1_000_000


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _permission(given: tuple[str, str]) -> Permission:
    kind, pattern = given
    for known in KINDS:
        if kind == known:
            if not 1 <= len(pattern) <= PATTERN_CHARACTERS_MAX:
                raise InvalidArgumentError(f"a queue name pattern must have 1 to {PATTERN_CHARACTERS_MAX} characters")
            return Permission(known, pattern)
    raise InvalidArgumentError(f"unknown permission {kind!r:.80}; use one of {', '.join(KINDS)}")


_decode_row: Final = msgpack_decoder(_Row)


def _decode(key_id: str, row: bytes) -> _Row:
    if row[:1] != bytes((LAYOUT,)):
        raise CorruptionError(f"the row of API key {key_id} has an unknown layout: {row[:1].hex() or 'empty'}")
    try:
        return _decode_row(memoryview(row)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError(f"the row of API key {key_id} is damaged: {error}") from None
