"""Numbers and sizes as text for people."""

from __future__ import annotations


def number(value: float) -> str:
    """Format with few digits: 12,345 or 3.4 M."""
    magnitude = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if magnitude >= limit:
            return f"{value / limit:.3g} {letter}"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.1f}" if magnitude >= 10 else f"{value:.3g}"


def size(value: float) -> str:
    """Format a number of bytes: 1.5 MiB."""
    for limit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= limit:
            return f"{value / limit:.1f} {name}"
    return f"{value:.0f} B"


def size_range(below: int) -> str:
    """Format the upper bound of a bucket of sizes; 1 is the bucket of empty values."""
    return "none" if below == 1 else f"< {size(below)}".replace(".0 ", " ")


def text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)


def exact(value: float | None) -> str:
    """Format for a column of numbers: integers with all digits."""
    return f"{value:,}" if isinstance(value, int) else text(value)
