"""The preference store (SPEC A3): what users prefer, one row each.

    preferences    | uuid (16) |  ->  {"owner", "type", "name", "created_ms", "updated_ms", "attributes"}    JSON

Who owns a preference and when it changed are fields of the row, so they can be read without knowing what a type keeps
in its attributes. Version 1 kept one flat object: `owner`, `type`, `name`, `createdDate` and `lastUpdatedDate` (ms)
among the attributes. The upgrade takes those that have the right type out and leaves everything else where it was;
what has no owner belongs to nobody, "".

Nothing is held in memory. A damaged row is reported by `open_and_load` and left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final
from uuid import UUID

import msgspec

from basaltmq.catalog.attributes import Attributes, encode_attributes
from basaltmq.catalog.commits import Change, Commits
from basaltmq.catalog.faults import Fault, FaultKind, LoadReport
from basaltmq.catalog.lifecycle import Lifecycle
from basaltmq.decoding import json_decoder
from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.store.versions import bring_up_to_date

VERSION_NAME: Final = "preferences_version"
VERSION: Final = 2

TEXT_BYTES_MAX: Final = 0xFFFF
"""Of an owner, a type or a name: as long as a name anywhere in the catalog may be."""

PREFERENCES_PER_CHANGE_MAX: Final = 10_000
"""In one call; with the limit on attributes it keeps a batch within what the store takes."""

CHANGE_BYTES_MAX: Final = 64 << 20
"""Of all preferences in one call."""

TIME_MS_MAX: Final = (1 << 63) - 1

_ROWS_AT_ONCE: Final = 1000
_END: Final = b"\xff" * 17


class Preference(msgspec.Struct, frozen=True):
    """One preference of one user."""

    id: UUID
    owner: str
    type: str
    name: str
    created_ms: int
    updated_ms: int
    attributes: Attributes


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    owner: str
    type: str
    name: str
    created_ms: int
    updated_ms: int
    attributes: dict[str, Any]


class _RowOut(msgspec.Struct):
    owner: str
    type: str
    name: str
    created_ms: int
    updated_ms: int
    attributes: msgspec.Raw


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = json_decoder(_Row)
_decode_flat: Final = json_decoder(dict[str, Any])

PreferenceHandler = Callable[[Preference], bool | None]
"""Is handed every preference; returning False stops the walk."""


class PreferenceStore:
    """Preferences over a store."""

    def __init__(self, store: Store, commits: Commits | None = None) -> None:
        self.commits = commits or Commits(store)
        self._store = store
        self._life = Lifecycle("preference store")

    def open_and_load(self, handler: PreferenceHandler) -> LoadReport:
        """Open, upgrading what is older, and hand every sound preference over; the report has the damaged ones."""
        self._life.open()
        try:
            with self.commits.lock:
                bring_up_to_date(self._store, VERSION_NAME, VERSION, {1: _upgrade_from_1}, (Family.PREFERENCES,))
            return self._load(handler)
        except BaseException:
            self._life.close()
            raise

    def get(self, preference_id: UUID) -> Preference | None:
        self._life.require_open()
        raw = self._store.get(Family.PREFERENCES, keys.preference_key(preference_id))
        return None if raw is None else decode_preference(preference_id, raw)

    def update_or_create(self, preferences: Iterable[Preference]) -> None:
        """Put every one of them, in one batch."""
        self._life.require_open()
        with self.commits.change() as change:
            self._stage(change, preferences)

    def replace(self, remove: Iterable[UUID], put: Iterable[Preference]) -> None:
        """Remove those with the ids of `remove`, put those of `put`, in one batch. An id may be in both."""
        self._life.require_open()
        with self.commits.change() as change:
            for preference_id in remove:
                if not isinstance(preference_id, UUID):
                    raise InvalidArgumentError(f"an id must be a UUID, not {type(preference_id).__name__}")
                change.delete(Family.PREFERENCES, keys.preference_key(preference_id))
            self._stage(change, put)

    def close(self) -> None:
        """Closing twice is fine. The store below stays open."""
        self._life.close()

    def on_delete(self) -> None:
        """Remove all of it and close. What is opened here next is new."""
        with self.commits.change() as change:
            change.delete_range(Family.PREFERENCES, b"", _END)
            change.delete(Family.VERSION, VERSION_NAME.encode())
        self._life.close()

    def _stage(self, change: Change, preferences: Iterable[Preference]) -> None:
        seen: set[UUID] = set()
        size_bytes = 0
        for preference in preferences:
            raw = encode_preference(preference)
            if preference.id in seen:
                raise InvalidArgumentError(f"preference {preference.id} is there twice in one call")
            seen.add(preference.id)
            size_bytes += len(raw)
            if len(seen) > PREFERENCES_PER_CHANGE_MAX or size_bytes > CHANGE_BYTES_MAX:
                raise LimitExceededError(
                    f"one call takes at most {PREFERENCES_PER_CHANGE_MAX} preferences of {CHANGE_BYTES_MAX} bytes "
                    "together; use several calls"
                )
            change.put(Family.PREFERENCES, keys.preference_key(preference.id), raw)

    def _load(self, handler: PreferenceHandler) -> LoadReport:
        report = LoadReport()
        for key, raw in self._store.scan(Family.PREFERENCES):
            preference_id = None
            try:
                preference_id = keys.decode_preference_key(key)
                preference = decode_preference(preference_id, raw)
            except CorruptionError as error:
                report.add(Fault(FaultKind.DAMAGED_ROW, str(error), preference_id))
                continue
            report.visited += 1
            if handler(preference) is False:
                break
        return report


def encode_preference(preference: Preference) -> bytes:
    """The row of a preference handed in by a caller, after every check."""
    if not isinstance(preference, Preference) or not isinstance(preference.id, UUID):
        raise InvalidArgumentError("preferences must be Preference with a UUID as id")
    what = f"preference {preference.id}"
    for field in ("owner", "type", "name"):
        _check_text(getattr(preference, field), f"the {field} of {what}")
    for field in ("created_ms", "updated_ms"):
        time_ms = getattr(preference, field)
        if type(time_ms) is not int or not 0 <= time_ms <= TIME_MS_MAX:
            raise InvalidArgumentError(f"the {field} of {what} must be ms since 1970, not {time_ms!r:.80}")
    return _encode(
        _RowOut(
            preference.owner,
            preference.type,
            preference.name,
            preference.created_ms,
            preference.updated_ms,
            msgspec.Raw(encode_attributes(preference.attributes, "preference", preference.id)),
        )
    )


def decode_preference(preference_id: UUID, raw: bytes) -> Preference:
    try:
        row = _decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"the row of preference {preference_id} is damaged: {error}") from error
    return Preference(preference_id, row.owner, row.type, row.name, row.created_ms, row.updated_ms, row.attributes)


def _check_text(text: object, what: str) -> None:
    try:
        if isinstance(text, str) and len(text.encode()) <= TEXT_BYTES_MAX:
            return
    except UnicodeEncodeError:
        pass
    raise InvalidArgumentError(f"{what} must be a text of at most {TEXT_BYTES_MAX} bytes of UTF-8, not {text!a:.80}")


def _upgrade_from_1(store: Store) -> Iterator[Batch]:
    """Rows a crash left upgraded look like version 2 and are passed over; damaged ones stay as they are."""
    rows = store.scan(Family.PREFERENCES)
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        batch = Batch()
        for key, raw in chunk:
            if not _is_row(raw):
                upgraded = _from_flat(raw)
                if upgraded is not None:
                    batch.put(Family.PREFERENCES, key, upgraded)
        yield batch


def _is_row(raw: bytes) -> bool:
    try:
        _decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _from_flat(raw: bytes) -> bytes | None:
    try:
        attributes = _decode_flat(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None

    def text(name: str) -> str:
        taken: str = attributes.pop(name) if isinstance(attributes.get(name), str) else ""
        return taken

    def time_ms(name: str) -> int:
        value = attributes.get(name)
        if type(value) is not int or not 0 <= value <= TIME_MS_MAX:
            return 0
        del attributes[name]
        return value

    owner, type_, name = text("owner"), text("type"), text("name")
    created_ms, updated_ms = time_ms("createdDate"), time_ms("lastUpdatedDate")
    return _encode(_Row(owner, type_, name, created_ms, updated_ms, attributes))
