"""Rows that could not be placed: kept as they were found, out of the way, until an operator decides.

    key    | lp(family label) | the row's own key |
    value  | layout u8 | reason u8 | at ns u64 | the row's own value |

Moving a row here and back is one batch each. What a row refers to stays where it is: recovery counts a quarantined
queue entry as one that holds its message.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, NamedTuple

from basaltmq.errors import CorruptionError, NotFoundError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.keys import queues as keys

LAYOUT: Final = 1
_HEAD: Final = Struct(">BBQ")


class Reason(enum.IntEnum):
    """Why a row is here."""

    MALFORMED = 1
    UNKNOWN_QUEUE = 2
    UNKNOWN_MESSAGE = 3


class Quarantined(NamedTuple):
    """A row in quarantine."""

    family: Family
    key: bytes
    value: bytes
    reason: Reason
    at_ns: int


class Quarantine:
    """The `quarantine` family of a store."""

    def __init__(self, store: Store, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._clock_ns = clock_ns

    def move_in(self, batch: Batch, family: Family, key: bytes, value: bytes, reason: Reason) -> None:
        """Take a row out of its family, in `batch`."""
        head = _HEAD.pack(LAYOUT, reason, self._clock_ns())
        batch.put(Family.QUARANTINE, keys.quarantine_key(family.label, key), head + value)
        batch.delete(family, key)

    def rows(self, family: Family | None = None) -> Iterator[Quarantined]:
        """What is here, of one family or of all."""
        start, end = (b"", None) if family is None else keys.prefix_range(keys.quarantine_prefix(family.label))
        for key, raw in self._store.scan(Family.QUARANTINE, start, end):
            yield _decode(key, raw)

    def restore(self, family: Family, key: bytes) -> None:
        """Put a row back where it was. Durable on return."""
        at = keys.quarantine_key(family.label, key)
        raw = self._store.get(Family.QUARANTINE, at)
        if raw is None:
            raise _missing(family, key)
        batch = Batch()
        batch.put(family, key, _decode(at, raw).value)
        batch.delete(Family.QUARANTINE, at)
        self._store.write(batch)
        self._store.sync()

    def discard(self, family: Family, key: bytes) -> None:
        """Delete a row for good. Durable on return."""
        at = keys.quarantine_key(family.label, key)
        if self._store.get(Family.QUARANTINE, at) is None:
            raise _missing(family, key)
        batch = Batch()
        batch.delete(Family.QUARANTINE, at)
        self._store.write(batch)
        self._store.sync()


def _decode(key: bytes, raw: bytes) -> Quarantined:
    label, own_key = keys.decode_quarantine_key(key)
    if label not in BY_LABEL or len(raw) < _HEAD.size or raw[0] != LAYOUT:
        raise CorruptionError(f"a quarantined row of family {label!r} is itself not readable: {key[:48].hex()}")
    _, reason, at_ns = _HEAD.unpack_from(raw)
    try:
        known = Reason(reason)
    except ValueError:
        raise CorruptionError(f"a quarantined row of family {label!r} has the unknown reason {reason}") from None
    return Quarantined(BY_LABEL[label], own_key, raw[_HEAD.size :], known, at_ns)


def _missing(family: Family, key: bytes) -> NotFoundError:
    return NotFoundError(f"no row {key[:48].hex()} of family {family.label} is in quarantine; list what is")
