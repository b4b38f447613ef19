"""The node secret: 32 random bytes in a file next to the node store.

SCRAM derives the salts of unknown user names from it. A salt that changed after a restart would reveal that the name is
unknown.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SECRET_BYTES: Final = 32


def node_secret(file: Path) -> bytes:
    """Return the secret in the file. A missing or incomplete file is replaced by a new secret."""
    try:
        found = file.read_bytes()
    except FileNotFoundError:
        found = b""
    if len(found) == SECRET_BYTES:
        return found
    made = os.urandom(SECRET_BYTES)
    draft = file.with_name(f"{file.name}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, made)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(draft, file)
    return made
