"""The census of a store before it is damaged: which row or frame holds each message.

    messages    label -> queue, message id and key of every row with it
    records     topic, partition and label -> shard and offset
    frames      shard -> first and last offset, lane, segment file and bytes of each frame

The checker compares losses with the ranges in the repair report. Records that are only in the ring are not included,
because they are after the end of their lane.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.soak.ledger import Label

from basaltmq.errors import DamagedFrameError
from basaltmq.log.frame import COLUMNAR, KAFKA
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import scan
from basaltmq.queues.content import Content
from basaltmq.queues.entries.backing import APART
from basaltmq.queues.entries.rows import payload_of, read_entry
from basaltmq.store.directory import LOG
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as queue_keys
from basaltmq.store.open import open_view
from basaltmq.streams.shards import Engine
from basaltmq.streams.view import StreamView

READ_RECORDS = 10_000


class Held(NamedTuple):
    """A message in a queue."""

    queue: str
    id: str
    family: str
    key: bytes


class Recorded(NamedTuple):
    """A record in a topic."""

    topic: str
    topic_id: str
    partition: int
    shard: int
    offset: int


class Frame(NamedTuple):
    """A frame of the log."""

    first: int
    last: int
    lane: str
    position: int
    segment: str
    begin: int
    end: int


@dataclass
class Census:
    messages: dict[Label, list[Held]] = field(default_factory=dict)
    records: dict[tuple[str, int, Label], Recorded] = field(default_factory=dict)
    frames: dict[int, list[Frame]] = field(default_factory=dict)
    _partitions: dict[tuple[str, Label], Recorded] = field(default_factory=dict)

    @classmethod
    def take(cls, store: Path) -> Census:
        """Read a store that no process has open."""
        census = cls()
        with closing(open_view(store)) as view:
            content = Content(view)
            for family in (Family.MESSAGES, Family.DELAYED):
                for key, row in view.scan(family):
                    own = queue_keys.message_of(key)[0] if family is Family.DELAYED else key
                    entry = read_entry(own, row)
                    payload = content.get(entry) if entry.flags & APART else payload_of(row)
                    held = Held(queue_keys.decode_message_key(own)[0], own[-16:].hex(), family.label, key)
                    label = label_of(payload)
                    if label is not None:
                        census.messages.setdefault(label, []).append(held)
        census._topics(store)
        census._log(store / LOG)
        return census

    def record_of(self, topic: str, partition: int | None, label: Label) -> Recorded | None:
        """Return the record of a label in a partition. None: in any partition."""
        if partition is not None:
            return self.records.get((topic, partition, label))
        if not self._partitions:
            self._partitions = {(its_topic, its_label): at for (its_topic, _, its_label), at in self.records.items()}
        return self._partitions.get((topic, label))

    def _topics(self, store: Path) -> None:
        with StreamView.open(store) as view:
            for topic in list(view.topics()):
                if topic.config.engine is Engine.MEMORY:
                    continue
                for partition, shard in enumerate(topic.shards):
                    info = view.info(topic.name, partition)
                    offset = info.start_offset
                    while offset < info.high_watermark:
                        try:
                            batch = view.read(topic.name, partition, offset, max_records=READ_RECORDS)
                        except DamagedFrameError as error:
                            offset = error.last_offset + 1
                            continue
                        for record in batch.records():
                            at = Recorded(topic.name, str(topic.id), partition, shard, record.offset)
                            label = label_of(record.value or b"")
                            if label is not None:
                                self.records[topic.name, partition, label] = at
                        if batch.next_offset <= offset:
                            break
                        offset = batch.next_offset

    def _log(self, log: Path) -> None:
        for directory in sorted(each for each in log.glob("*") if each.is_dir()):
            if not LaneView.exists(directory):
                continue
            with closing(LaneView(directory)) as lane:
                segments = lane.segments()
                for found in scan(lane, lane.start):
                    header = found.header
                    if header.kind not in (COLUMNAR, KAFKA):
                        continue
                    segment = next(each for each in reversed(segments) if each.start <= found.position)
                    begin = found.position - segment.start
                    self.frames.setdefault(header.shard, []).append(
                        Frame(
                            header.base_offset,
                            header.base_offset + header.last_delta,
                            directory.name,
                            found.position,
                            segment.path.name,
                            begin,
                            begin + header.size_bytes,
                        )
                    )


def label_of(payload: bytes) -> Label | None:
    """Return the label in a payload; None for a message that is not in the ledger, such as a mark."""
    try:
        return Label.of(payload)
    except ValueError:
        return None
