"""What people type and pipe into `basalt topic`: lines of records, places to move a group to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

import click

from basaltmq.errors import LimitExceededError
from basaltmq.log.record import Record
from basaltmq.streams.groups import Reset
from basaltmq.streams.record_lines import decode_record

APPEND_RECORDS: Final = 1_000
APPEND_BYTES: Final = 4 << 20
"""Lines, and bytes of lines, read from stdin before they are appended as one batch."""

LINE_BYTES_MAX: Final = 64 << 20
"""A line of input: the largest record there is by default, in base64 or with every byte escaped, and room to spare."""


def batches(source: BinaryIO, raw: bool, key: str | None) -> Iterator[list[Record]]:
    """The records of a source, a batch at a time."""
    batch: list[Record] = []
    size_bytes = 0
    for number, line in _lines(source):
        batch.append(decode_record(number, line, raw=raw, key=key))
        size_bytes += len(line)
        if len(batch) >= APPEND_RECORDS or size_bytes >= APPEND_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _lines(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := source.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise LimitExceededError(f"line {number} is over {LINE_BYTES_MAX} bytes")
        stripped = line.rstrip(b"\r\n")
        if stripped:
            yield number, stripped


def reset_to(text: str) -> Reset | int:
    if text.isdigit():
        return int(text)
    if text in (Reset.EARLIEST, Reset.LATEST):
        return Reset(text)
    raise click.UsageError(f"--reset takes earliest, latest or an offset, not {text!r}")
