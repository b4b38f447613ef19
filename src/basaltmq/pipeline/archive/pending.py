"""Counts the offsets of topics that an archive does not contain yet."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pyspark.sql import SparkSession

from basaltmq.pipeline.archive.manifest import read_manifests
from basaltmq.pipeline.files import Files
from basaltmq.pipeline.source import offsets_of, open_topics


class Pending(msgspec.Struct, frozen=True):
    """Counts of offsets, which include records that were deleted or compacted."""

    records: int
    partitions: int
    """Partitions with pending offsets."""


def pending(spark: SparkSession, location: Mapping[str, str], topics: list[str], archive: str) -> Pending:
    """Return the pending offsets, from the topics and the manifests. No record is read."""
    root = archive.rstrip("/")
    done: dict[tuple[str, int], int] = {}
    for manifest in read_manifests(Files(spark, root), root):
        for topic, of in manifest.offsets.items():
            for number, (_, last) in of.items():
                at = topic, int(number)
                done[at] = max(done.get(at, 0), last + 1)
    with open_topics(location) as view:
        offsets = offsets_of(view, topics)
    pending_offsets = [max(0, end - max(start, done.get(at, 0))) for at, (start, end) in offsets.items()]
    return Pending(sum(pending_offsets), sum(count > 0 for count in pending_offsets))
