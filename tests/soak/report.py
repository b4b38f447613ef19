"""The report on a damaged store: output of verify, repair and the broker, and the losses that it names.

A report names a loss by queue and id, by topic and offset, by a key range, by a range of bytes, or by the damaged file
if its content is unknown. Other text does not name a loss.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.census import Census, Frame, Held, Recorded

OFFSETS = re.compile(
    r"(?:lost|bytes\)): shard (\d+), offsets (\d+) to (\d+)|shard (\d+) has lost offsets (\d+) to (\d+)"
)
"""Offsets that verify, the open or a read ("damaged frame ... (672 bytes): shard ...") names."""
BYTES = re.compile(r"/(\d+)/([^/\s]+) bytes (\d+) to (\d+):")
TAIL = re.compile(r"/(\d+) ends at byte (\d+), but was durable up to byte (\d+)")
LACKING = re.compile(r"/(\d+) lacks the bytes (\d+) to (\d+), which were durable")
GONE_PARTITION = re.compile(r"the shard of partition (\d+) and its records are lost")
WHOLE_FILES = ("confirmed writes", "writes", "table")
"""Subjects of losses of which only the file is known."""


@dataclass
class Report:
    """`file` is the name of the damaged file."""

    file: str
    text: str = ""
    losses: list[dict[str, Any]] = field(default_factory=list)

    def add_repair(self, said: str) -> None:
        """The JSON of `store repair`."""
        self.text += said
        rows = json.loads(said[said.index("[") :]) if "[" in said else []
        self.losses += [row for row in rows if row["kind"] == "lost"]

    def add_unreadable(self, store: Path) -> None:
        """Ranges that an open store skipped."""
        for path in store.glob("quarantine/unreadable.jsonl"):
            for line in path.read_text().splitlines():
                self.losses.append({"subject": "unreadable", "ids": [], "what": line, **json.loads(line)})

    @property
    def is_empty(self) -> bool:
        """Return whether the report names no loss."""
        return not (self.losses or any(each.search(self.text) for each in (OFFSETS, BYTES, TAIL, LACKING)))

    def names_message(self, held: Held) -> bool:
        """Whether the report names a message by its id or its key range."""
        if re.search(rf"\b{held.id}\b", self.text):
            return True
        return any(
            held.id in loss["ids"] or _covers(loss, held.family, held.key) or self._names_file(loss)
            for loss in self.losses
        )

    def names_record(self, record: Recorded | None, census: Census) -> bool:
        """Whether the report names a record by offset, frame or partition. None: the record was only in the ring."""
        if record is None:
            return TAIL.search(self.text) is not None
        for found in OFFSETS.finditer(self.text):
            shard, first, last = (int(each) for each in found.groups() if each is not None)
            if shard == record.shard and first <= record.offset <= last:
                return True
        for frame in census.frames.get(record.shard, ()):
            if frame.first <= record.offset <= frame.last and self._names_frame(frame):
                return True
        return any(self._names_partition(loss, record, census) for loss in self.losses)

    def _names_frame(self, frame: Frame) -> bool:
        for lane, segment, begin, end in BYTES.findall(self.text):
            is_there = lane == frame.lane and segment == frame.segment
            if is_there and int(begin) < frame.end and frame.begin < int(end):
                return True
        if any(lane == frame.lane and frame.position >= int(end) for lane, end, _ in TAIL.findall(self.text)):
            return True
        size = frame.end - frame.begin
        return any(
            lane == frame.lane and frame.position < int(end) and int(begin) < frame.position + size
            for lane, begin, end in LACKING.findall(self.text)
        )

    def _names_partition(self, loss: dict[str, Any], record: Recorded, census: Census) -> bool:
        if record.shard not in census.frames and self._names_file(loss):
            # This engine stores records in the store.
            return True
        if loss["family"] == "stream_records":
            key = record.shard.to_bytes(8, "big") + record.offset.to_bytes(8, "big")
            is_one = loss["subject"] == f"topic {record.topic!r}[{record.partition}]"
            return (is_one and f"offset {record.offset}" in loss["ids"]) or _covers(loss, "stream_records", key)
        gone = GONE_PARTITION.search(loss["what"])
        if gone is not None and int(gone[1]) == record.partition:
            return record.topic_id in loss["ids"]
        return False

    def _names_file(self, loss: dict[str, Any]) -> bool:
        return loss["subject"] in WHOLE_FILES and self.file in loss["what"]


def _covers(loss: dict[str, Any], family: str, key: bytes) -> bool:
    if loss["family"] != family or loss["ids"] or not (loss.get("start") or loss.get("end")):
        return False
    end = loss.get("end")
    return bytes.fromhex(loss["start"]) <= key and (end is None or key < bytes.fromhex(end))
