"""The part of an audit that looks at the rows of a store: groups, queues, bodies, leases, imports, frames of the log.

Plain scans of a view; what is large about a store, its records, is Spark's to count (`audit`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from basaltmq.log.verify import verify_log
from basaltmq.pipeline.findings import Finding, Severity
from basaltmq.queues.rows import NO_BODY, unwrap
from basaltmq.queues.stats import QueueStats
from basaltmq.store import keys
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.open import open_view
from basaltmq.streams.imports import runs
from basaltmq.streams.view import LOG, StreamView


def audit_rows(path: Path, view: StreamView) -> list[Finding]:
    """Everything but records."""
    found = [Finding(Severity.LOSS, "checksum", "log", fault) for fault in verify_log(path / LOG)]
    found += _groups(view)
    with closing(open_view(path)) as store:
        found += _orphaned_commits(store, view)
        found += _queues(store)
        found += _imports(store)
    return found


def _groups(view: StreamView) -> Iterator[Finding]:
    for group in view.groups():
        for each in view.lag(group):
            subject = f"{group} on {each.topic}[{each.partition}]"
            if each.committed > each.end_offset:
                said = f"committed {each.committed}, but the partition ends at {each.end_offset}"
                yield Finding(Severity.FAULT, "ahead", subject, said)
            if each.committed < each.start_offset:
                count = each.start_offset - each.committed
                said = f"{count} offsets before {each.start_offset} were removed before the group read them"
                yield Finding(Severity.LOSS, "unread", subject, said)


def _orphaned_commits(store: Store, view: StreamView) -> Iterator[Finding]:
    known = {topic.id for topic in view.topics()}
    gone: Counter[str] = Counter()
    for key, _ in store.scan(Family.CONSUMER_OFFSETS):
        group, topic_id, _ = keys.decode_consumer_offset_key(key)
        if topic_id not in known:
            gone[group] += 1
    for group, count in sorted(gone.items()):
        yield Finding(Severity.FAULT, "orphan", group, f"{count} offsets are of topics that are not there")


def _queues(store: Store) -> Iterator[Finding]:
    counts = {
        keys.decode_queue_stats_key(key): QueueStats.decode(keys.decode_queue_stats_key(key), raw)
        for key, raw in store.scan(Family.QUEUE_STATS)
    }
    found: Counter[str] = Counter()
    bodiless: Counter[str] = Counter()
    for key, row in store.scan(Family.MESSAGES):
        queue, _, place_ns, _ = keys.decode_message_key(key)
        stats = counts.get(queue)
        if stats is not None and place_ns < stats.floor_ns:
            continue
        found[queue] += 1
        _, _, body_id, _ = unwrap(row)
        if body_id != NO_BODY and store.get(Family.BODIES, keys.body_key(body_id)) is None:
            bodiless[queue] += 1
    for queue, stats in sorted(counts.items()):
        if stats.messages != found[queue]:
            said = f"counts {stats.messages} messages and has {found[queue]}"
            severity = Severity.LOSS if found[queue] < stats.messages else Severity.FAULT
            yield Finding(severity, "count", f"queue {queue}", said)
    for queue in sorted(set(found) - set(counts)):
        yield Finding(Severity.FAULT, "orphan", f"queue {queue}", f"{found[queue]} messages of a queue without counts")
    for queue, count in sorted(bodiless.items()):
        yield Finding(Severity.LOSS, "reference", f"queue {queue}", f"the bodies of {count} messages are not there")
    calls = Counter(keys.decode_lease_call_key(key)[0] for key, _ in store.scan(Family.LEASE_CALLS))
    for queue in sorted(set(calls) - set(counts)):
        yield Finding(Severity.FAULT, "orphan", f"queue {queue}", f"{calls[queue]} leases of a queue without counts")


def _imports(store: Store) -> Iterator[Finding]:
    for run, state in runs(store):
        if state.intent is not None:
            said = f"batch {state.intent.batch} was left in the middle; the next import into this store finishes it"
            yield Finding(Severity.FAULT, "import", run, said)
