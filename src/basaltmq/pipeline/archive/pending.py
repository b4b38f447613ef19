"""What an archive has yet to take in: the offsets of topics, less those its manifests name."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pyspark.sql import SparkSession

from basaltmq.pipeline.archive.manifest import read_manifests
from basaltmq.pipeline.files import Files
from basaltmq.pipeline.source import looking, offsets_of


class Pending(msgspec.Struct, frozen=True):
    """Counted in offsets: records that were deleted or compacted away are in it."""

    records: int
    partitions: int
    """With something to take in."""


def pending(spark: SparkSession, place: Mapping[str, str], topics: list[str], archive: str) -> Pending:
    """Look at topics and manifests; nothing is read."""
    root = archive.rstrip("/")
    done: dict[tuple[str, int], int] = {}
    for manifest in read_manifests(Files(spark, root), root):
        for topic, of in manifest.offsets.items():
            for number, (_, last) in of.items():
                at = topic, int(number)
                done[at] = max(done.get(at, 0), last + 1)
    with looking(place) as view:
        offsets = offsets_of(view, topics)
    waiting = [max(0, end - max(start, done.get(at, 0))) for at, (start, end) in offsets.items()]
    return Pending(sum(waiting), sum(count > 0 for count in waiting))
