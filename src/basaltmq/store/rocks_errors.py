"""Maps RocksDB status texts to Basalt's errors.

`rocksdict` raises plain `Exception` with RocksDB's status as text. The text begins with the status code. Tests provoke
each case on a real database.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from rocksdict import DbClosedError

from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    DiskFullError,
    InvalidConfigError,
    StorageError,
    StoreClosedError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreStalledError,
    UnknownFamilyError,
    UnknownOptionError,
)

_FILE: Final = re.compile(r"[\w./-]*(?:\d+\.(?:sst|blob|log)|MANIFEST-\d+|OPTIONS-\d+|CURRENT)\b")

_BLAME: Final = re.compile(r" The file \S*MANIFEST-\d+ may be corrupted\.?")
"""RocksDB appends this to every failure while it applies the MANIFEST, even if an SST file is at fault. Basalt checks
the MANIFEST first, so the sentence is dropped."""


def named_file(text: str, otherwise: Path) -> Path:
    """Return the database file named in a RocksDB text, or `otherwise` if it names none."""
    named = _FILE.search(_BLAME.sub("", text))
    return Path(named.group(0)) if named else otherwise


def translate(error: Exception, path: Path) -> BasaltError:
    """Return the Basalt error for a `rocksdict` exception."""
    if isinstance(error, BasaltError):
        return error
    if isinstance(error, DbClosedError):
        return StoreClosedError(f"the store at {path} is closed")
    text = str(error)
    if "No space left" in text or "Disk quota exceeded" in text or "NoSpace" in text:
        return DiskFullError(f"no space left for {path}; free space and open the store again ({text})")
    if text.startswith("Corruption"):
        return CorruptionError(f"{named_file(text, path)} is damaged: {text}")
    if "No such file or directory" in text and _FILE.search(text):
        return CorruptionError(f"{named_file(text, path)} is missing; restore a backup, or run repair ({text})")
    if "Write stall" in text:
        return StoreStalledError(f"the store at {path} is behind with compaction; nothing was written, retry later")
    if "Column families not opened" in text:
        names = text.rpartition(":")[2].strip()
        return UnknownFamilyError(
            f"{path} was written by another version of Basalt and has families that this version does not know: "
            f"{names}. Open it with that version."
        )
    if "Could not find option" in text or "not changeable" in text.lower():
        name = text.rpartition(":")[2].strip()
        return UnknownOptionError(f"{name!r} is not an option that can change on an open store")
    if "Error parsing" in text:
        name = text.partition("Error parsing ")[2].partition(":")[0]
        return InvalidConfigError(f"the value for option {name!r} is not valid; the option was not changed")
    if "lock hold" in text or "While lock file" in text:
        return StoreLockedError(f"{path} is open elsewhere: {text}")
    if "Read-only file system" in text or "Permission denied" in text:
        return StoreReadOnlyError(f"{path} cannot be written: {text}")
    return StorageError(f"{path}: {text}")
