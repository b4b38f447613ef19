"""What an audit finds: one line each, told apart by whether records are lost."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec


class Severity(enum.StrEnum):
    """How bad it is."""

    NOTE = "note"
    """Worth knowing; nothing is wrong."""
    FAULT = "fault"
    """Something does not fit, and no record is known to be lost."""
    LOSS = "loss"
    """Records are missing or damaged."""


class Finding(msgspec.Struct, frozen=True):
    """One of them."""

    severity: Severity
    kind: str
    subject: str
    """A partition, a file, a group, a queue."""
    said: str


def exit_code(findings: Iterable[Finding]) -> int:
    """0 if all is well, 2 if something does not fit, 3 if records are lost."""
    worst = {each.severity for each in findings}
    if Severity.LOSS in worst:
        return 3
    return 2 if Severity.FAULT in worst else 0
