"""The preference store (SPEC A3): preferences of users, one row each.

    preferences    | uuid (16) |  ->  {"owner", "type", "name", "created_ms", "updated_ms", "attributes"}    JSON

Owner and times are fields of the row, so they can be read without knowledge of the attributes of a type. Version 1 was
one flat object, with `owner`, `type`, `name`, `createdDate` and `lastUpdatedDate` (ms) among the attributes. The
upgrade moves those with the right type to fields and leaves the others among the attributes. A missing owner becomes
"".

Nothing is cached. `open_and_load` reports damaged rows and leaves them unchanged.
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
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.versions import bring_up_to_date

VERSION_NAME: Final = "preferences_version"
VERSION: Final = 2

TEXT_BYTES_MAX: Final = 0xFFFF
"""Size limit of an owner, type or name, the same as for names in the catalog."""

PREFERENCES_PER_CHANGE_MAX: Final = 10_000
"""Preferences per call. With the limit on attributes, a batch stays within the store's limit."""

CHANGE_BYTES_MAX: Final = 64 << 20
"""Bytes of all preferences of one call."""

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
"""Called with every preference. Returning False stops the scan."""


class PreferenceStore:
    """Preferences over a store."""

    def __init__(self, store: Store, commits: Commits | None = None) -> None:
        self.commits = commits or Commits(store)
        self._store = store
        self._life = Lifecycle("preference store")

    def open_and_load(self, handler: PreferenceHandler) -> LoadReport:
        """Open, upgrade older rows, and call `handler` with every sound preference. The report lists damaged rows."""
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
        raw = self._store.get(Family.PREFERENCES, catalog_keys.preference_key(preference_id))
        return None if raw is None else decode_preference(preference_id, raw)

    def update_or_create(self, preferences: Iterable[Preference]) -> None:
        """Put all preferences in one batch."""
        self._life.require_open()
        with self.commits.change() as change:
            self._stage(change, preferences)

    def replace(self, remove: Iterable[UUID], put: Iterable[Preference]) -> None:
        """Remove the preferences with the ids of `remove` and put those of `put`, in one batch. An id may be in
        both."""
        self._life.require_open()
        with self.commits.change() as change:
            for preference_id in remove:
                if not isinstance(preference_id, UUID):
                    raise InvalidArgumentError(f"an id must be a UUID, not {type(preference_id).__name__}")
                change.delete(Family.PREFERENCES, catalog_keys.preference_key(preference_id))
            self._stage(change, put)

    def close(self) -> None:
        """Close. Closing twice is allowed. The underlying store stays open."""
        self._life.close()

    def on_delete(self) -> None:
        """Remove all rows and close. The next open finds a new store."""
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
                raise InvalidArgumentError(f"preference {preference.id} occurs twice in one call")
            seen.add(preference.id)
            size_bytes += len(raw)
            if len(seen) > PREFERENCES_PER_CHANGE_MAX or size_bytes > CHANGE_BYTES_MAX:
                raise LimitExceededError(
                    f"one call can write {PREFERENCES_PER_CHANGE_MAX} preferences and {CHANGE_BYTES_MAX} bytes; "
                    "use several calls"
                )
            change.put(Family.PREFERENCES, catalog_keys.preference_key(preference.id), raw)

    def _load(self, handler: PreferenceHandler) -> LoadReport:
        report = LoadReport()
        for key, raw in self._store.scan(Family.PREFERENCES):
            preference_id = None
            try:
                preference_id = catalog_keys.decode_preference_key(key)
                preference = decode_preference(preference_id, raw)
            except CorruptionError as error:
                report.add(Fault(FaultKind.DAMAGED_ROW, str(error), preference_id))
                continue
            report.visited += 1
            if handler(preference) is False:
                break
        return report


def encode_preference(preference: Preference) -> bytes:
    """Check a caller's preference and encode its row."""
    if not isinstance(preference, Preference) or not isinstance(preference.id, UUID):
        raise InvalidArgumentError("preferences must be Preference with a UUID as id")
    what = f"preference {preference.id}"
    for field in ("owner", "type", "name"):
        _check_text(getattr(preference, field), f"the {field} of {what}")
    for field in ("created_ms", "updated_ms"):
        time_ms = getattr(preference, field)
        if type(time_ms) is not int or not 0 <= time_ms <= TIME_MS_MAX:
            raise InvalidArgumentError(f"the {field} of {what} must be milliseconds since 1970, not {time_ms!r:.80}")
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
    """Yield batches of upgraded rows. Rows of an interrupted upgrade are skipped, and damaged rows stay unchanged."""
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
