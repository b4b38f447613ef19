"""Computes the next range of a streaming query: compares the stored offsets with the present topics."""

from __future__ import annotations

from typing import NamedTuple

from basaltmq.errors import NotFoundError
from basaltmq.pipeline.source import Topics
from pyspark_basalt.losses import check_end, report_loss, report_recreated
from pyspark_basalt.offsets import Ids, Offsets
from pyspark_basalt.options import ReadOptions


class Position(NamedTuple):
    """Offsets with the ids of their topics."""

    offsets: Offsets
    ids: Ids


class Progress(NamedTuple):
    """The range of the next batch."""

    begins: Offsets
    """The stored position, with new partitions, and with corrections after a loss."""
    end: Position
    is_corrected: bool
    """Whether a loss moved the position. The checkpoint must hold the new one before the topic passes the old one."""


def advance(view: Topics, stored: Position, latest: Position, options: ReadOptions) -> Progress:
    """Return the next range. A topic that is no longer listed keeps its position, so that its return is recognised."""
    begins: Offsets = {topic: dict(of) for topic, of in stored.offsets.items()}
    ends: Offsets = {topic: dict(of) for topic, of in stored.offsets.items()}
    ids = dict(stored.ids)
    is_corrected = False
    for topic, of in latest.offsets.items():
        actual = latest.ids[topic]
        expected = ids.get(topic, actual)
        is_recreated = expected != actual
        if is_recreated:
            # One partition is enough: the id belongs to the topic.
            report_recreated(topic, min(of), expected, actual, options)
            begins[topic], ends[topic] = {}, {}
            is_corrected = True
        ids[topic] = actual
        known = begins.setdefault(topic, {})
        for number, to in of.items():
            if number not in known:
                known[number] = _beginning(view, topic, number, to, is_recreated, options)
            elif to < known[number]:
                check_end(topic, number, known[number], to, options)
                known[number] = to
                is_corrected = True
            ends.setdefault(topic, {})[number] = max(to, known[number])
    return Progress(begins, Position(ends, ids), is_corrected)


def _beginning(view: Topics, topic: str, number: int, end: int, is_recreated: bool, options: ReadOptions) -> int:
    """Return the first offset of a partition that is new to the query."""
    try:
        start_offset = view.info(topic, number).start_offset
    except NotFoundError:
        # Deleted after `latest` was taken. The next batch detects it.
        return end
    if start_offset > 0 and not is_recreated:
        report_loss(
            f"{topic}[{number}] is new to the query and begins at offset {start_offset}, expected 0: its first records "
            "were removed before they were read",
            f"begins at offset {start_offset}",
            options,
        )
    return start_offset
