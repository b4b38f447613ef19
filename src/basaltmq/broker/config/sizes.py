"""Sizes in settings: a number of bytes, and a share of a whole."""

from __future__ import annotations

import re
from typing import Final, Self

import msgspec

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

_UNITS: Final = {"": 1, "b": 1, "k": KIB, "kb": KIB, "kib": KIB, "m": MIB, "mb": MIB, "mib": MIB}
_UNITS_LARGE: Final = {"g": GIB, "gb": GIB, "gib": GIB, "t": 1024 * GIB, "tb": 1024 * GIB, "tib": 1024 * GIB}
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_PERCENT: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


class ByteCount(int):
    """A number of bytes, written as a number or as text with a unit: 1048576, "1MiB", "1.5 GiB"."""

    @classmethod
    def parse(cls, given: object) -> Self:
        if isinstance(given, int) and not isinstance(given, bool):
            count = given
        elif isinstance(given, str) and (found := _SIZE.fullmatch(given)):
            unit = (_UNITS | _UNITS_LARGE).get(found[2].lower())
            if unit is None:
                raise ValueError(f"{found[2]!r} is not a unit; use KiB, MiB, GiB or TiB")
            count = int(float(found[1]) * unit)
        else:
            raise ValueError(f'expected a size such as 1048576 or "64MiB", got {given!r}')
        if count < 0:
            raise ValueError(f"a size must not be negative, got {count}")
        return cls(count)

    def __str__(self) -> str:
        for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
            if self and self % unit == 0:
                return f"{int(self) // unit}{name}"
        return f"{int(self)}B"


class Share(msgspec.Struct, frozen=True):
    """A part of a whole, as a percentage ("60%") or as a size ("4GiB")."""

    percent: float | None = None
    size_bytes: ByteCount | None = None

    @classmethod
    def parse(cls, given: object) -> Self:
        if isinstance(given, str) and (found := _PERCENT.fullmatch(given)):
            percent = float(found[1])
            if not 0 < percent <= 100:
                raise ValueError(f"a share must be above 0% and at most 100%, got {given!r}")
            return cls(percent=percent)
        try:
            return cls(size_bytes=ByteCount.parse(given))
        except ValueError:
            raise ValueError(f'expected a share such as "60%" or a size such as "4GiB", got {given!r}') from None

    def of(self, total_bytes: int) -> int:
        """Return the size in bytes for a whole of `total_bytes`."""
        if self.size_bytes is not None:
            return int(self.size_bytes)
        return int(total_bytes * (self.percent or 0) / 100)

    def __str__(self) -> str:
        return str(self.size_bytes) if self.size_bytes is not None else f"{self.percent:g}%"
