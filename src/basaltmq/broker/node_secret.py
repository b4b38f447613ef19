"""A random secret of a node, in a file beside its store: 32 bytes that survive restarts.

SCRAM derives from it the salts of names that nobody has. A salt that changed with a restart would give them away.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SECRET_BYTES: Final = 32


def node_secret(file: Path) -> bytes:
    """The secret in the file. A file that is missing or not whole is written anew."""
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
