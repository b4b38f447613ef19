"""Export and import of stream metadata as JSON lines (SPEC D5): topics, shards, groups and committed offsets.

Each line is one JSON object, so memory stays bounded for a million topics and any tool can read the file:

    {"basalt": "streams", "version": 1}
    {"topic": "orders", "id": "...", "config": {...}, "shards": [{"partition": 0, "start_offset": 3, "next_offset": 9}]}
    {"group": "billing", "topic": "orders", "partition": 0, "offset": 7, "metadata": "", "committed_ms": 0, "epoch": -1}

Records are not exported. An imported shard is empty and starts at the exported `next_offset`. So no offset is assigned
twice, and committed offsets keep their meaning. Shard numbers belong to a store and are not exported. An imported topic
keeps its id if that id is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from uuid import UUID

import msgspec

from basaltmq.decoding import converter
from basaltmq.errors import BasaltError, CorruptionError, InvalidArgumentError, StoreTooNewError, TopicExistsError
from basaltmq.streams.drivers import Drivers
from basaltmq.streams.offsets import Commit, Offsets, TopicPartition
from basaltmq.streams.topics import TOPICS_PER_BATCH, NewTopic, Topic, TopicConfig, Topics, in_batches

FORMAT: Final = "streams"
VERSION: Final = 1
_PAGE: Final = 500
_COMMITS_PER_BATCH: Final = 1_000


class Head(msgspec.Struct, forbid_unknown_fields=True):
    basalt: str
    version: int


class ShardLine(msgspec.Struct, forbid_unknown_fields=True):
    partition: int
    start_offset: int
    next_offset: int


class TopicLine(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    id: UUID
    config: TopicConfig
    shards: list[ShardLine]


class CommitLine(msgspec.Struct, forbid_unknown_fields=True):
    group: str
    topic: str
    partition: int
    offset: int
    metadata: str = ""
    committed_ms: int = 0
    epoch: int = -1


_HEAD: Final = converter(Head)
_TOPIC: Final = converter(TopicLine)
_COMMIT: Final = converter(CommitLine)


class Imported(msgspec.Struct):
    """The result of an import."""

    topics: int = 0
    topics_skipped: list[str] = []
    offsets: int = 0
    offsets_skipped: int = 0


def export_metadata(topics: Topics, drivers: Drivers, offsets: Offsets) -> Iterator[bytes]:
    """Yield the metadata as JSON lines, each with its newline."""
    yield _line(Head(FORMAT, VERSION))
    after: str | None = None
    while True:
        page = topics.page(start_after=after, limit=_PAGE)
        for topic in page.topics:
            yield _line(_topic_line(topic, drivers))
        after = page.next_after
        if after is None:
            break
    for group in offsets.groups():
        for (topic_id, partition), commit in offsets.of_group(group).items():
            known = topics.summary_of(topic_id)
            if known is not None:
                yield _line(
                    CommitLine(
                        group,
                        known.name,
                        partition,
                        commit.offset,
                        commit.metadata,
                        commit.committed_ms,
                        commit.epoch,
                    )
                )


def import_metadata(lines: Iterable[bytes | str], topics: Topics, offsets: Offsets) -> Imported:
    """Create the topics and offsets that the lines describe. Existing topics are skipped and listed in the result.

    A damaged line raises an error with its number. Lines before it are imported; a second import skips them.
    """
    done = Imported()
    group = ""
    commits: dict[TopicPartition, int | Commit] = {}

    def flush() -> None:
        if commits:
            offsets.commit(group, commits)
            done.offsets += len(commits)
            commits.clear()

    wanted: list[NewTopic] = []

    def create() -> None:
        for batch in in_batches(wanted):
            _create(batch, topics, done)
        wanted.clear()

    for line in _checked(lines, create):
        if isinstance(line, TopicLine):
            starts = {shard.partition: shard.next_offset for shard in line.shards}
            wanted.append(NewTopic(line.topic, line.config, line.id, starts))
            if len(wanted) == TOPICS_PER_BATCH:
                create()
        elif isinstance(line, CommitLine):
            create()
            if line.group != group or len(commits) >= _COMMITS_PER_BATCH:
                flush()
                group = line.group
            topic = topics.find(line.topic)
            if topic is None or not 0 <= line.partition < topic.config.partitions:
                done.offsets_skipped += 1
                continue
            commits[topic.id, line.partition] = Commit(line.offset, line.committed_ms, line.epoch, line.metadata)
    create()
    flush()
    return done


def _checked(lines: Iterable[bytes | str], create: Callable[[], None]) -> Iterator[Head | TopicLine | CommitLine]:
    """Yield the decoded lines. Before the error of a damaged line, create the topics of the lines above it."""
    for number, raw in enumerate(lines, 1):
        try:
            line = _decoded(number, raw)
        except BasaltError:
            create()
            raise
        yield line


def _create(batch: list[NewTopic], topics: Topics, done: Imported) -> None:
    for wanted, made in zip(batch, topics.create_many(batch), strict=True):
        if isinstance(made, TopicExistsError):
            done.topics_skipped.append(wanted.name)
        elif isinstance(made, BasaltError):
            raise made
        else:
            done.topics += 1


def _topic_line(topic: Topic, drivers: Drivers) -> TopicLine:
    shards = []
    for partition in range(topic.config.partitions):
        info = drivers.info(topic.name, partition)
        shards.append(ShardLine(partition, info.start_offset, info.next_offset))
    return TopicLine(topic.name, topic.id, topic.config, shards)


def _line(line: msgspec.Struct) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _decoded(number: int, raw: bytes | str) -> Head | TopicLine | CommitLine:
    try:
        fields: Any = msgspec.json.decode(raw)
        if number == 1:
            return _head(_HEAD(fields))
        if not isinstance(fields, dict):
            raise InvalidArgumentError(f"line {number} is not a JSON object")
        if "group" in fields:
            return _COMMIT(fields)
        return _TOPIC(fields)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"line {number} of the metadata cannot be decoded: {error}") from error


def _head(head: Head) -> Head:
    if head.basalt != FORMAT:
        raise InvalidArgumentError(f"the file is an export of {head.basalt!r}; expected {FORMAT!r}")
    if head.version > VERSION:
        raise StoreTooNewError(
            f"the metadata has version {head.version}, this Basalt reads up to {VERSION}: import it with a newer Basalt"
        )
    return head
