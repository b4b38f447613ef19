"""Finds writes at the end of the WAL whose large bodies were lost in a power loss.

A sync makes bodies durable before the WAL. But the kernel may write WAL bytes to disk on its own, earlier than the
bodies that they refer to. After a power loss such a write is complete in the WAL and its body is not. It was never
confirmed, and neither was any later write. So the WAL is cut before it, like a torn tail.

Every batch with bodies has the position up to which bodies were durable when it was written (DURABLE_KEY). Only bodies
after the last such position are read. A write that SYNCED lists as durable is not cut: its body is damaged.
"""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from basaltmq.errors import CorruptionError
from basaltmq.store.families import Family
from basaltmq.store.integrity.body_frames import BODIES, DURABLE_KEY, Place, Position, check_places
from basaltmq.store.integrity.manifest import family_numbers
from basaltmq.store.integrity.synced import read_synced
from basaltmq.store.integrity.wal import LogFault, LogScan, read_placed_records
from basaltmq.store.integrity.wal_batch import changes, last_sequence_of

_WHAT: Final = "a write whose body is not on disk"


class _Write(NamedTuple):
    """A batch with bodies."""

    log: int
    cut_at: int
    sequence: int
    places: list[tuple[bytes, Place]]

    def reaches(self, position: Position) -> bool:
        return any(Position(place.file, place.offset) >= position for _, place in self.places)


def without_bodies_cut(directory: Path, manifest: Path, logs: list[LogScan]) -> list[LogScan]:
    """Return the logs, with a fault where the first write without its body begins."""
    if not any(_mentions_bodies(log) for log in logs):
        return logs
    writes, durable = _unproven(manifest, logs)
    synced = read_synced(directory)
    confirmed = 0 if synced is None else synced.sequence
    for write in writes:
        places = [each for each in write.places if Position(each[1].file, each[1].offset) >= durable]
        if write.sequence <= confirmed or next(check_places(directory / BODIES, places), None) is None:
            continue
        cut = LogFault(write.cut_at, _WHAT, True, write.cut_at)
        later = [replace(log, fault=LogFault(0, _WHAT, True, 0)) if log.records else log for log in logs]
        return [*logs[: write.log], replace(logs[write.log], fault=cut), *later[write.log + 1 :]]
    return logs


def _mentions_bodies(log: LogScan) -> bool:
    """Whether a log may have a batch with bodies. A log without one is not parsed.

    The key may be split over two blocks, so a short part of it counts as a match.
    """
    if not log.size_bytes:
        return False
    half = len(DURABLE_KEY) // 2
    with open(log.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(DURABLE_KEY[:half]) >= 0 or data.find(DURABLE_KEY[half:]) >= 0


def _unproven(manifest: Path, logs: list[LogScan]) -> tuple[deque[_Write], Position]:
    """Return the last writes with bodies, and the position before which bodies are durable."""
    numbers = family_numbers(manifest)
    places_number, files_number = numbers.get(Family.BODY_PLACES.label), numbers.get(Family.BODY_FILES.label)
    writes: deque[_Write] = deque()
    durable = Position()
    for number, log in enumerate(logs):
        for cut_at, record in read_placed_records(log):
            if DURABLE_KEY not in record:
                continue
            write = _Write(number, cut_at, last_sequence_of(record), [])
            for change in changes(record):
                if change.family == files_number and change.key == DURABLE_KEY:
                    durable = max(durable, Position.decode(change.value))
                elif change.family == places_number and change.value:
                    try:
                        write.places.append((change.key, Place.decode(change.key, change.value)))
                    except CorruptionError:
                        continue
            writes.append(write)
            while writes and not writes[0].reaches(durable):
                writes.popleft()
    return writes, durable
