"""Data loss: records that a query should read but cannot.

Every loss is reported here. With `failOnDataLoss=true` it is a DataLossError; with `false` it is logged and the query
continues. The message names the topic, the partition, and the expected and the actual state.

| cause | detection | where a query continues with `false` |
| --- | --- | --- |
| topic deleted and created again | the id of the topic differs | at the beginning of the new topic |
| end offset below the query's position | high watermark, same topic id | at the end of the topic |
| beginning deleted before it was read | start offset above the position | at the start offset |
| topic deleted with a planned range | topic not found | the range is empty |
| frame damaged | checksum | after the frame |
"""

from __future__ import annotations

import logging

from basaltmq.errors import DamagedFrameError, DataLossError
from basaltmq.streams.adapter import ShardInfo
from pyspark_basalt.options import ReadOptions

_log = logging.getLogger("basaltmq.spark")


def report_loss(what: str, continues: str, options: ReadOptions) -> None:
    """Raise DataLossError, or log and return if the query accepts losses. `continues` completes "the query ..."."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{what}. With failOnDataLoss=false the query {continues}")
    _log.warning("%s; the query %s (failOnDataLoss=false)", what, continues)


def report_recreated(topic: str, number: int, expected: str, actual: str, options: ReadOptions) -> None:
    report_loss(
        f"{topic}[{number}] belongs to another topic: expected topic id {expected}, found {actual}; {topic!r} was "
        "deleted and created again",
        "reads the new topic from its beginning",
        options,
    )


def report_gone(topic: str, number: int, begin: int, end: int, options: ReadOptions) -> None:
    report_loss(
        f"{topic}[{number}] was deleted: expected offsets {begin} to {end - 1}, found no topic {topic!r}",
        "skips them",
        options,
    )


def check_end(topic: str, number: int, expected: int, actual: int, options: ReadOptions) -> None:
    """Report an end offset below the position of the query."""
    if actual < expected:
        report_loss(
            f"{topic}[{number}] ends at offset {actual}, expected {expected} or more: the store was restored from an "
            "older copy, or another store is at this path",
            f"continues at offset {actual}",
            options,
        )


def check_kept(topic: str, number: int, begin: int, end: int, info: ShardInfo, options: ReadOptions) -> int:
    """Return the first readable offset of a range."""
    if begin >= end:
        return begin
    check_end(topic, number, end, info.high_watermark, options)
    if begin >= info.start_offset:
        return begin
    report_loss(
        f"{topic}[{number}] begins at offset {info.start_offset}, expected {begin}: offsets {begin} to "
        f"{info.start_offset - 1} were removed before they were read",
        "skips them",
        options,
    )
    return info.start_offset


def skip_damage(topic: str, number: int, error: DamagedFrameError, options: ReadOptions) -> int:
    """Report a damaged frame. Return the offset after it."""
    try:
        report_loss(
            f"{topic}[{number}], offsets {error.base_offset} to {error.last_offset}, cannot be read: {error.reason}. "
            "Restore the store from a backup",
            "skips them",
            options,
        )
    except DataLossError as loss:
        raise loss from error
    return error.last_offset + 1
