"""Where a store is: the directory itself, that of a virtual host, or a broker's with the name of a virtual host.

<data>/STORE ...                 a store, as embedded programs make it
<data>/vhosts/<hash>/.vhost      a broker's: the name of a virtual host, and beside it
<data>/vhosts/<hash>/store/      its store
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
    """The store a path and a virtual host mean."""
    where = Path(path)
    if (where / MARKER).exists():
        return where
    if (where / NAME_FILE).exists():
        return where / STORE
    if not (where / VHOSTS).is_dir():
        raise NotFoundError(
            f"there is no store at {path}: path is the directory given to basalt, on a disk every node sees"
        )
    names = []
    for folder in sorted((where / VHOSTS).iterdir()):
        if (folder / NAME_FILE).exists():
            name = read_line(folder / NAME_FILE, "write it again by hand, or restore it").get("name")
            if name == vhost:
                return folder / STORE
            names.append(str(name))
    known = ", ".join(names[:10]) or "none"
    raise NotFoundError(f"the broker's directory {path} has no vhost {vhost!r}; there are {known}")
