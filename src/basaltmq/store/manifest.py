"""What we need to know from a MANIFEST: from which write-ahead log on RocksDB replays.

A record of a MANIFEST is one edit: tag (varint), value, tag, value ... Those of interest come first in it, before the
lists of files; reading stops at the first tag that is not among them:

    1 comparator, 8193 database id     bytes, after a varint of their length
    2 log number, 3 next file, 4 last sequence, 9 previous log, 10 oldest log to keep, 203 last family    varint

Logs below the highest "oldest log to keep" are left over from before a flush. RocksDB passes over them, and nobody
syncs them any more, so after a power loss they may well be torn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from basaltmq.store.wal import read_records

_TEXTS: Final = frozenset((1, 8193))
_NUMBERS: Final = frozenset((2, 3, 4, 9, 10, 203))
_OLDEST_LOG: Final = 10


def oldest_log(manifest: Path) -> int:
    """The number of the first write-ahead log that is still needed; 0 if all may be."""
    return max((_oldest_log_of(edit) for edit in read_records(manifest)), default=0)


def _oldest_log_of(edit: bytes) -> int:
    at = oldest = 0
    try:
        while at < len(edit):
            tag, at = _varint(edit, at)
            if tag in _TEXTS:
                length, at = _varint(edit, at)
                at += length
            elif tag in _NUMBERS:
                number, at = _varint(edit, at)
                if tag == _OLDEST_LOG:
                    oldest = number
            else:
                break
    except IndexError:
        # The checksum matched, so this is a form we do not know; then every log counts.
        return 0
    return oldest


def _varint(data: bytes, at: int) -> tuple[int, int]:
    shift = value = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
