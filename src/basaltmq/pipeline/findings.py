"""Findings of an audit, and the exit code that follows from them."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec


class Severity(enum.StrEnum):
    NOTE = "note"
    """Information, not a problem."""
    FAULT = "fault"
    """Inconsistent data, without known loss of records."""
    LOSS = "loss"
    """Records are missing or damaged."""


class Finding(msgspec.Struct, frozen=True):
    severity: Severity
    kind: str
    subject: str
    """A partition, file, group or queue."""
    detail: str


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 without problems, 2 for inconsistent data, 3 for lost records."""
    worst = {each.severity for each in findings}
    if Severity.LOSS in worst:
        return 3
    return 2 if Severity.FAULT in worst else 0
