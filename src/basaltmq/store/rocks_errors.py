"""The one table from RocksDB's texts to our errors.

`rocksdict` raises plain `Exception` with RocksDB's status as text; its first words are the status code. The table is
pinned by tests that provoke each case for real.
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
"""Added to whatever goes wrong while the MANIFEST is applied, also when a table is at fault. We read that one first."""


def named_file(text: str, otherwise: Path) -> Path:
    """The file of a database that a text of RocksDB names, `otherwise` if it names none."""
    named = _FILE.search(_BLAME.sub("", text))
    return Path(named.group(0)) if named else otherwise


def translate(error: Exception, path: Path) -> BasaltError:
    """What an exception out of `rocksdict` means."""
    if isinstance(error, BasaltError):
        return error
    if isinstance(error, DbClosedError):
        return StoreClosedError(f"the store at {path} is closed")
    text = str(error)
    if "No space left" in text or "Disk quota exceeded" in text or "NoSpace" in text:
        return DiskFullError(f"no space left for {path}; free some and open the store again ({text})")
    if text.startswith("Corruption"):
        return CorruptionError(f"{named_file(text, path)} is damaged: {text}")
    if "No such file or directory" in text and _FILE.search(text):
        return CorruptionError(f"{named_file(text, path)} is missing; restore a backup ({text})")
    if "Write stall" in text:
        return StoreStalledError(f"the store at {path} is behind with compaction; nothing was written, try again")
    if "Column families not opened" in text:
        names = text.rpartition(":")[2].strip()
        return UnknownFamilyError(f"{path} holds families this Basalt does not know: {names}; use a newer Basalt")
    if "Could not find option" in text or "not changeable" in text.lower():
        name = text.rpartition(":")[2].strip()
        return UnknownOptionError(f"{name!r} is not an option that can change on an open store")
    if "Error parsing" in text:
        name = text.partition("Error parsing ")[2].partition(":")[0]
        return InvalidConfigError(f"the value for option {name!r} cannot be read; the option was not changed")
    if "lock hold" in text or "While lock file" in text:
        return StoreLockedError(f"{path} is open elsewhere: {text}")
    if "Read-only file system" in text or "Permission denied" in text:
        return StoreReadOnlyError(f"{path} cannot be written: {text}")
    return StorageError(f"{path}: {text}")
