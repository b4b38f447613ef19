"""Lines that are piped into a command, in portions that are written together.

A portion ends at its limits, at the end, and where the source pauses: what `tail -f` pipes is written as it comes, and
what somebody typed is there when they press Ctrl-C.
"""

from __future__ import annotations

import io
import select
from collections.abc import Iterator
from typing import BinaryIO, Final, TypeAlias, cast

from basaltmq.errors import LimitExceededError

CHUNK_BYTES: Final = 256 << 10
"""One read: a few times what a pipe holds."""

LINE_BYTES_MAX: Final = 64 << 20
"""A line of input: the largest record there is by default, in base64 or with every byte escaped, and room to spare."""

Portion: TypeAlias = list[tuple[int, bytes]]
"""Lines with their numbers, which begin at 1, without the newline."""


def portions(source: BinaryIO, lines_max: int, bytes_max: int) -> Iterator[Portion]:
    """The lines of a source."""
    reader = cast(io.BufferedReader, source)
    portion: Portion = []
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
            portion.append((number, line))
            size_bytes += len(line)
            if len(portion) >= lines_max or size_bytes >= bytes_max:
                yield portion
                portion, size_bytes = [], 0
        if portion and _pauses(reader):
            yield portion
            portion, size_bytes = [], 0
    if parts_bytes:
        _check(number + 1, parts_bytes)
        portion.append((number + 1, b"".join(parts)))
    if portion:
        yield portion


def _check(number: int, size_bytes: int) -> None:
    if size_bytes > LINE_BYTES_MAX:
        raise LimitExceededError(f"line {number} is over {LINE_BYTES_MAX} bytes")


def _pauses(reader: io.BufferedReader) -> bool:
    """Whether the next read would wait."""
    try:
        ready, _, _ = select.select([reader.fileno()], [], [], 0)
    except OSError:
        # No file of the system's, as in tests: everything is there already.
        return False
    return not ready
