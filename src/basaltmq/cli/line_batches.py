"""Reads lines from stdin in batches.

A batch ends at its limits, at the end of the input, and when the source pauses. So lines from `tail -f` are written as
they arrive, and typed lines are written before Ctrl-C.
"""

from __future__ import annotations

import io
import select
from collections.abc import Iterator
from typing import BinaryIO, Final, TypeAlias, cast

from basaltmq.errors import LimitExceededError

CHUNK_BYTES: Final = 256 << 10
"""Size of one read: a few times the capacity of a pipe."""

LINE_BYTES_MAX: Final = 64 << 20
"""Limit of a line: the largest record by default, in base64 or with every byte escaped, and a margin."""

LineBatch: TypeAlias = list[tuple[int, bytes]]
"""(line number from 1, line without newline)."""


def line_batches(source: BinaryIO, lines_max: int, bytes_max: int) -> Iterator[LineBatch]:
    """Yield the lines of a source in batches."""
    reader = cast(io.BufferedReader, source)
    batch: LineBatch = []
    size_bytes = number = 0
    parts: list[bytes] = []
    parts_bytes = 0
    while chunk := reader.read1(CHUNK_BYTES):
        head, *others = chunk.split(b"\n")
        parts.append(head)
        parts_bytes += len(head)
        _check(number + 1, parts_bytes)
        if others:
            others.insert(0, b"".join(parts))
            parts = [others.pop()]
            parts_bytes = len(parts[0])
        for line in others:
            number += 1
            _check(number, len(line))
            batch.append((number, line))
            size_bytes += len(line)
            if len(batch) >= lines_max or size_bytes >= bytes_max:
                yield batch
                batch, size_bytes = [], 0
        if batch and _pauses(reader):
            yield batch
            batch, size_bytes = [], 0
    if parts_bytes:
        _check(number + 1, parts_bytes)
        batch.append((number + 1, b"".join(parts)))
    if batch:
        yield batch


def _check(number: int, size_bytes: int) -> None:
    if size_bytes > LINE_BYTES_MAX:
        raise LimitExceededError(f"line {number} is longer than {LINE_BYTES_MAX} bytes; split it")


def _pauses(reader: io.BufferedReader) -> bool:
    """Whether the next read would block."""
    try:
        ready, _, _ = select.select([reader.fileno()], [], [], 0)
    except OSError:
        # Not a file descriptor, as in tests: all input is available.
        return False
    return not ready
