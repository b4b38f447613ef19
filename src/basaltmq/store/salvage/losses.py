"""What could not be read: key ranges of families, and writes that a log no longer holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from basaltmq.store.families import Family
from basaltmq.store.integrity.wal import DamagedRecord


@dataclass(slots=True)
class Gap:
    """Keys of a family that could not be read: start <= key < end."""

    family: str
    start: bytes
    end: bytes | None
    file: str
    """The damaged file; empty if it is not known."""
    what: str
    """What is wrong, in RocksDB's words."""
    following: bytes | None = None
    """The first key behind the gap that could be read."""

    @property
    def row(self) -> bytes | None:
        """The key, if it is one row that is lost."""
        return self.start if self.end == self.start + b"\0" else None

    @property
    def preceding(self) -> bytes | None:
        """The last key before the gap that could be read, if that is known."""
        return self.start[:-1] if self.start.endswith(b"\0") and self.row is None else None

    def covers(self, key: bytes) -> bool:
        return self.start <= key and (self.end is None or key < self.end)


@dataclass(slots=True)
class Losses:
    """Everything that could not be read in one database."""

    gaps: list[Gap] = field(default_factory=list)
    records: dict[Path, list[DamagedRecord]] = field(default_factory=dict)
    """Damaged stretches of write-ahead logs."""
    missing_writes: str = ""
    """Why writes are missing of which nothing is left: a log that is gone or too short."""
    manifest_rebuilt: bool = False

    def __bool__(self) -> bool:
        return bool(self.gaps or self.records or self.missing_writes)

    @property
    def in_log(self) -> bool:
        """Whether writes to any row may be missing."""
        return bool(self.records or self.missing_writes)

    def hit(self, *families: Family) -> bool:
        """Whether rows of one of these families may be missing."""
        # A table that does not say its family may be of any.
        labels = {"", *(family.label for family in families)}
        return self.in_log or any(gap.family in labels for gap in self.gaps)

    def may_cover(self, family: Family, key: bytes) -> bool:
        """Whether the row with this key may be among what is lost."""
        return self.in_log or any(gap.family in ("", family.label) and gap.covers(key) for gap in self.gaps)
