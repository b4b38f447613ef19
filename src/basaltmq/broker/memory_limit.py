"""How much memory this process may use, and uses: the machine's, or its container's if that is less."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CGROUP: Final = Path("/sys/fs/cgroup")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def memory_bytes(root: Path = CGROUP) -> int:
    """What a share of memory is a share of."""
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
    """The limit of this process's group and of every group above it (version 2), or the one of version 1."""
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
    """What this process holds."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
