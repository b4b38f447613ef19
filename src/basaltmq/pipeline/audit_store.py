"""The part of an audit that looks at the rows of a store: groups, imports, frames of the log; queues (`audit_queues`).

Plain scans of a view; what is large about a store, its records, is Spark's to count (`audit`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from basaltmq.errors import NotFoundError
from basaltmq.log.verify import verify_log
from basaltmq.pipeline.audit_queues import audit_messages, audit_queues
from basaltmq.pipeline.findings import Finding, Severity
from basaltmq.store import keys
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.open import open_view
from basaltmq.streams.groups import PartitionLag
from basaltmq.streams.imports import runs
from basaltmq.streams.view import LOG, StreamView


def audit_rows(path: Path, view: StreamView) -> list[Finding]:
    """Everything but records."""
    found = [Finding(Severity.LOSS, "checksum", "log", fault) for fault in verify_log(path / LOG)]
    found += _groups(view)
    with closing(open_view(path)) as store:
        found += _orphaned_commits(store, view)
        found += audit_queues(store)
        found += audit_messages(store)
        found += _imports(store)
    return found


def _groups(view: StreamView) -> Iterator[Finding]:
    ahead: list[tuple[str, PartitionLag]] = []
    for group in view.groups():
        for each in view.lag(group):
            if each.committed > each.end_offset:
                ahead.append((group, each))
            if each.committed < each.start_offset:
                count = each.start_offset - each.committed
                said = f"{count} offsets before {each.start_offset} were removed before the group read them"
                yield Finding(Severity.LOSS, "unread", _subject(group, each), said)
    if not ahead:
        return
    # A view sees the log a moment before it sees commits: beside a writer, a group may seem ahead that is not.
    view.refresh()
    for group, each in ahead:
        try:
            end = view.info(each.topic, each.partition).high_watermark
        except NotFoundError:
            continue
        if each.committed > end:
            said = f"committed {each.committed}, but the partition ends at {end}"
            yield Finding(Severity.FAULT, "ahead", _subject(group, each), said)


def _subject(group: str, lag: PartitionLag) -> str:
    return f"{group} on {lag.topic}[{lag.partition}]"


def _orphaned_commits(store: Store, view: StreamView) -> Iterator[Finding]:
    # Topics of before and after: one may be made, or deleted with its commits, while this looks.
    known = {topic.id for topic in view.topics()}
    found = Counter(keys.decode_consumer_offset_key(key)[:2] for key, _ in store.scan(Family.CONSUMER_OFFSETS))
    if not {topic_id for _, topic_id in found} <= known:
        view.refresh()
        known |= {topic.id for topic in view.topics()}
    gone: Counter[str] = Counter()
    for (group, topic_id), count in found.items():
        if topic_id not in known:
            gone[group] += count
    for group, count in sorted(gone.items()):
        yield Finding(Severity.FAULT, "orphan", group, f"{count} offsets are of topics that are not there")


def _imports(store: Store) -> Iterator[Finding]:
    for run, state in runs(store):
        if state.intent is not None:
            said = f"batch {state.intent.batch} was left in the middle; the next import into this store finishes it"
            yield Finding(Severity.FAULT, "import", run, said)
