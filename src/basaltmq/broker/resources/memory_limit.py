"""Memory limit of this process (the machine's memory or a smaller cgroup limit), and its resident memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CGROUP: Final = Path("/sys/fs/cgroup")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def memory_bytes(root: Path = CGROUP) -> int:
    """Return the memory available to this process: the minimum of the machine's memory and all cgroup limits."""
    machine = os.sysconf("SC_PHYS_PAGES") * _PAGE
    limits = [machine]
    for file in _limit_files(root):
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def _limit_files(root: Path) -> list[Path]:
    """Return the limit files of this process's cgroup and all its ancestors (v2), and the limit file of v1."""
    found = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        return found
    for line in own.splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            group = root / path.lstrip("/")
            while group != root and root in group.parents:
                found.append(group / "memory.max")
                group = group.parent
    return found


def resident_bytes() -> int:
    """Return the resident set size of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
