"""Losses of a database: unreadable key ranges of families, and writes missing from the WAL."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from basaltmq.store.families import Family
from basaltmq.store.integrity.wal import DamagedRecord


@dataclass(slots=True)
class Gap:
    """Unreadable keys of a family: start <= key < end."""

    family: str
    start: bytes
    end: bytes | None
    file: str
    """The damaged file, empty if unknown."""
    what: str
    """The fault, as RocksDB describes it."""
    following: bytes | None = None
    """The first readable key after the gap."""

    @property
    def row(self) -> bytes | None:
        """The key, if the gap is a single row."""
        return self.start if self.end == self.start + b"\0" else None

    @property
    def preceding(self) -> bytes | None:
        """The last readable key before the gap, if known."""
        return self.start[:-1] if self.start.endswith(b"\0") and self.row is None else None

    def covers(self, key: bytes) -> bool:
        return self.start <= key and (self.end is None or key < self.end)


@dataclass(slots=True)
class Losses:
    """Everything unreadable in one database."""

    gaps: list[Gap] = field(default_factory=list)
    records: dict[Path, list[DamagedRecord]] = field(default_factory=dict)
    """Damaged parts of WAL files."""
    missing_writes: str = ""
    """Why writes are missing without a trace: a WAL file is missing or too short."""
    manifest_rebuilt: bool = False
    recovered: list[str] = field(default_factory=list)
    """What the planes recovered, one line each. Not a loss."""

    def __bool__(self) -> bool:
        return bool(self.gaps or self.records or self.missing_writes)

    @property
    def in_log(self) -> bool:
        """Whether writes to any row may be missing."""
        return bool(self.records or self.missing_writes)

    def hit(self, *families: Family) -> bool:
        """Whether rows of one of these families may be missing."""
        # An SST file without a known family may belong to any.
        labels = {"", *(family.label for family in families)}
        return self.in_log or any(gap.family in labels for gap in self.gaps)

    def may_cover(self, family: Family, key: bytes) -> bool:
        """Whether the row with this key may be lost."""
        return self.in_log or any(gap.family in ("", family.label) and gap.covers(key) for gap in self.gaps)
