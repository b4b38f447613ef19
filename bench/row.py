"""One line of a bench's table."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A figure, and its target if there is one."""

    name: str
    value: float
    unit: str
    bar: str = ""
    passed: bool | None = None
