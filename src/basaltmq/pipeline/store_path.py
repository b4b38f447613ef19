"""Finds the store in a path: a store, the directory of a virtual host, or a broker's data directory.

<data>/STORE                   a store of an embedded program
<data>/vhosts/<hash>/.vhost    in a broker's directory: the name of a virtual host
<data>/vhosts/<hash>/store/    and its store
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from basaltmq.errors import NotFoundError
from basaltmq.store.directory import MARKER, read_line

DEFAULT_VHOST: Final = "/"
NAME_FILE: Final = ".vhost"
STORE: Final = "store"
VHOSTS: Final = "vhosts"


def store_path(path: str | Path, vhost: str = DEFAULT_VHOST) -> Path:
    """Return the store that a path and a virtual host select."""
    where = Path(path)
    if (where / MARKER).exists():
        return where
    if (where / NAME_FILE).exists():
        return where / STORE
    if not (where / VHOSTS).is_dir():
        raise NotFoundError(
            f"there is no store at {path}: give a data directory of Basalt, on a disk that every node can read"
        )
    names = []
    for folder in sorted((where / VHOSTS).iterdir()):
        if (folder / NAME_FILE).exists():
            name = read_line(folder / NAME_FILE, "write it again by hand, or restore it").get("name")
            if name == vhost:
                return folder / STORE
            names.append(str(name))
    known = ", ".join(names[:10]) or "none"
    raise NotFoundError(f"the broker's directory {path} has no vhost {vhost!r}; it has {known}")
