"""Reads the write batches in a WAL file without RocksDB, to name the rows of a damaged batch.

    sequence u64 | count u32 | changes ...                                     little-endian

    change   kind u8 | family varint, if the kind has one | key, and value or end of the range: varint length, bytes

The content is unverified, because the record did not match its checksum. A key is named only if it can be decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from basaltmq.errors import BasaltError
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.integrity.wal import DamagedRecord
from basaltmq.store.keys import queues as queue_keys
from basaltmq.store.salvage.naming import SHOWN_MAX, Loss

_HEAD_BYTES: Final = 12
_KINDS: Final = {
    0: (False, False),
    1: (False, True),
    4: (True, False),
    5: (True, True),
    7: (False, False),
    8: (True, False),
    14: (True, True),
    15: (False, True),
}
"""Kind -> (names a family, has a second text after the key)."""


class Change(NamedTuple):
    """One row change."""

    family: int
    key: bytes


def changes(payload: bytes) -> Iterator[Change]:
    """Yield the changes of a batch up to the first that cannot be parsed."""
    at = _HEAD_BYTES
    try:
        while at < len(payload):
            kind = payload[at]
            at += 1
            if kind not in _KINDS:
                return
            has_family, has_value = _KINDS[kind]
            family = 0
            if has_family:
                family, at = _varint(payload, at)
            key, at = _text(payload, at)
            if has_value:
                _, at = _text(payload, at)
            yield Change(family, key)
    except IndexError:
        return


class BatchNaming:
    """Describes damaged WAL records. `families` maps numbers to labels."""

    def __init__(self, families: Mapping[int, str]) -> None:
        self._families = families

    def losses(self, file: str, record: DamagedRecord) -> list[Loss]:
        """Return the losses of a damaged record, by queue."""
        ids: dict[str, list[str]] = {}
        others: dict[str, int] = {}
        for change in changes(record.payload):
            label = self._families.get(change.family, "")
            family = BY_LABEL.get(label)
            if family in (Family.MESSAGES, Family.DELAYED):
                try:
                    if family is Family.MESSAGES:
                        queue, _, _, message_id = queue_keys.decode_message_key(change.key)
                    else:
                        queue, _, _, _, message_id = queue_keys.decode_timed_message_key(change.key)
                except (BasaltError, UnicodeDecodeError):
                    continue
                ids.setdefault(queue, []).append(message_id.hex())
            elif label:
                others[label] = others.get(label, 0) + 1
        where = f"bytes {record.offset} to {record.end} of {file}"
        text = f"{where} hold no complete record"
        if others:
            text += "; changes of rows in " + ", ".join(f"{label} ({count})" for label, count in sorted(others.items()))
        found = [Loss(subject="writes", text=text, family="", file=file, end=None)]
        for queue, named in sorted(ids.items()):
            shown = ", ".join(named[:SHOWN_MAX]) + (
                f" and {len(named) - SHOWN_MAX} more" if len(named) > SHOWN_MAX else ""
            )
            found.append(
                Loss(
                    subject=f"queue {queue!r}",
                    text=f"the last changes of {len(named)} messages are lost: {shown}",
                    family=Family.MESSAGES.label,
                    file=file,
                    queues=[queue],
                    ids=named,
                )
            )
        return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    shift = value = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, at
        shift += 7


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    length, at = _varint(data, at)
    if at + length > len(data):
        raise IndexError
    return data[at : at + length], at + length
