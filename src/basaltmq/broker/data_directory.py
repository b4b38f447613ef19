"""Permissions of the data directory: readable by its user, and by its group if the operator allows it.

    new directory                     0700, files 0600
    exactly owner and group read      kept (0750, files 0640), for tools of the same group such as Spark jobs
    anything wider                    set to 0700 at start, with a warning

The directory contains messages, password hashes and API keys. The mode of the top directory protects everything below
it, so files of earlier versions need no change.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from basaltmq.broker.vhost_directory import NODE, STORE
from basaltmq.store.directory import MARKER

PRIVATE: Final = 0o700
_GROUP_READS: Final = 0o050
_TOO_WIDE: Final = 0o027
"""Write for the group, anything for others."""


def protect(path: Path) -> str | None:
    """Restrict the mode of a data directory and the umask of this process. Return a warning or None."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        os.umask(0o077)
        return None
    if not mode & _TOO_WIDE:
        os.umask(0o027 if mode & _GROUP_READS == _GROUP_READS else 0o077)
        return None
    os.umask(0o077)
    wide = f"{path} has mode {mode:04o}: other users can read its data"
    if not _is_ours(path):
        return f"{wide}. It contains other files, so its mode is unchanged; use a separate directory with mode 0700"
    try:
        os.chmod(path, PRIVATE)
    except OSError as error:
        return f"{wide}. Changing it failed: {error.strerror}"
    return f"changed the mode of {path} from {mode:04o} to 0700; set 0750 to let its group read"


def _is_ours(path: Path) -> bool:
    """Whether the directory is a broker's or empty. Restricting any other would lock out users of its files."""
    return (path / NODE / STORE / MARKER).exists() or not any(path.iterdir())
