"""Audit of the rows of a store: groups, imports, frames of the log, and queues (`audit/queues.py`).

It scans a view of the store. Spark counts the records (`audit/audit.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from basaltmq.errors import NotFoundError
from basaltmq.log.segment import segment_name
from basaltmq.log.verify import verify_log
from basaltmq.pipeline.audit.queues import audit_queues
from basaltmq.pipeline.findings import Finding, Severity
from basaltmq.store.api import Store
from basaltmq.store.directory import LOG
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.open import open_view
from basaltmq.streams.engines.segment.index.rows import SegmentStats
from basaltmq.streams.groups import PartitionLag
from basaltmq.streams.imports.imports import runs
from basaltmq.streams.view import StreamView

MISSING_SEGMENT: Final = "missing segment"


def audit_rows(path: Path, view: StreamView) -> list[Finding]:
    """Return the findings about everything except records."""
    found = missing_segments(path)
    found += [Finding(Severity.LOSS, "checksum", "log", fault) for fault in verify_log(path / LOG)]
    found += _groups(view)
    with closing(open_view(path)) as store:
        found += _orphaned_commits(store, view)
        found += audit_queues(store)
        found += _imports(store)
    return found


def missing_segments(path: Path) -> list[Finding]:
    """Find segments in the index whose files are missing or shorter than their frames.

    The last segment of a lane may be shorter, because its latest frames may be in the lane's ring.
    """
    found = _short_segments(path)
    # Check twice: a writer may delete a segment between reading its row and its file.
    return found and [each for each in _short_segments(path) if each in found]


def _short_segments(path: Path) -> list[Finding]:
    with closing(open_view(path)) as store:
        rows = list(store.scan(Family.STREAM_INDEX, *key_parts.prefix_range(b"S")))
    stats_of = {stream_keys.decode_log_segment_key(key): SegmentStats(raw) for key, raw in rows}
    last = dict(sorted(stats_of))
    found = []
    for (lane, start), stats in stats_of.items():
        name = f"{lane:04d}/{segment_name(start)}"
        try:
            size_bytes = (path / LOG / name).stat().st_size
        except FileNotFoundError:
            size_bytes = 0
        if size_bytes < (1 if start == last[lane] else stats.size_bytes):
            detail = f"has {size_bytes} bytes, but its {stats.frames} frames have {stats.size_bytes}"
            found.append(Finding(Severity.LOSS, MISSING_SEGMENT, f"{LOG}/{name}", detail))
    return found


def _groups(view: StreamView) -> Iterator[Finding]:
    ahead: list[tuple[str, PartitionLag]] = []
    for group in view.groups():
        for each in view.lag(group):
            if each.committed > each.end_offset:
                ahead.append((group, each))
            if each.committed < each.start_offset:
                count = each.start_offset - each.committed
                detail = f"{count} offsets before {each.start_offset} were deleted before the group read them"
                yield Finding(Severity.LOSS, "unread", _subject(group, each), detail)
    if not ahead:
        return
    # A view reads the log before the commits, so beside a writer a group may only seem to be ahead.
    view.refresh()
    for group, each in ahead:
        try:
            end = view.info(each.topic, each.partition).high_watermark
        except NotFoundError:
            continue
        if each.committed > end:
            detail = f"committed {each.committed}, but the partition ends at {end}"
            yield Finding(Severity.FAULT, "ahead", _subject(group, each), detail)


def _subject(group: str, lag: PartitionLag) -> str:
    return f"{group} on {lag.topic}[{lag.partition}]"


def _orphaned_commits(store: Store, view: StreamView) -> Iterator[Finding]:
    # Compare with the topics before and after: one may be created or deleted meanwhile.
    known = {topic.id for topic in view.topics()}
    found = Counter(stream_keys.decode_consumer_offset_key(key)[:2] for key, _ in store.scan(Family.CONSUMER_OFFSETS))
    if not {topic_id for _, topic_id in found} <= known:
        view.refresh()
        known |= {topic.id for topic in view.topics()}
    gone: Counter[str] = Counter()
    for (group, topic_id), count in found.items():
        if topic_id not in known:
            gone[group] += count
    for group, count in sorted(gone.items()):
        yield Finding(Severity.FAULT, "orphan", group, f"{count} offsets belong to topics that do not exist")


def _imports(store: Store) -> Iterator[Finding]:
    for run, state in runs(store):
        if state.intent is not None:
            detail = f"batch {state.intent.batch} is unfinished; the next import into this store completes it"
            yield Finding(Severity.FAULT, "import", run, detail)
