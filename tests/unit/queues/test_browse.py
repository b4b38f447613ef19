"""Browsing of queues by time, page by page, over all sub-queues."""

from __future__ import annotations

from pathlib import Path

import pytest

import basaltmq
from basaltmq.errors import InvalidArgumentError, QueueNotFoundError
from basaltmq.queues.browsing.arrow import SCHEMA, to_arrow
from basaltmq.queues.browsing.browse import FAMILIES, browse, queues_of, times_of
from basaltmq.store.api import Reader

pytestmark = pytest.mark.spec("E11", "F1")


def found(seen: Reader, queue: str, from_ns: int = 0, to_ns: int = 1 << 62, pages: int = 2) -> list[tuple[bytes, int]]:
    after, is_last, rows = b"", False, []
    while not is_last:
        page = browse(seen, queue, from_ns, to_ns, after=after, messages_max=pages)
        assert len(page.messages) <= pages
        is_last, after = page.is_last, page.cursors[-1] if page.cursors else after
        rows += [(each.payload, each.enqueued_ns) for each in page.messages]
    return rows


def test_browse_by_time_covers_all_sub_queues_without_changes(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        jobs = db.queue("jobs")
        db.queue("jobs2").enqueue(b"another's")
        for at in range(20):
            jobs.enqueue(b"%d" % at if at != 7 else b"7" * 9000, fairness_key=f"tenant{at % 3}")
        jobs.enqueue(b"later", delay_ms=3_600_000)
        leased = jobs.lease(2)
        with db.store.snapshot(*FAMILIES) as seen:
            everything = found(seen, "jobs")
            times = sorted(at for _, at in everything)
            assert len(everything) == 21
            assert {payload[:5] for payload, _ in everything} == {b"%d" % at for at in range(20) if at != 7} | {
                b"77777",
                b"later",
            }
            assert times_of(seen, "jobs") == (times[0], times[-1])
            for low, high in ((times[4], times[11]), (0, times[0] + 1), (times[-1], 1 << 62), (times[3], times[3])):
                for pages in (1, 3, 100):
                    assert sorted(found(seen, "jobs", low, high, pages), key=lambda row: row[1]) == sorted(
                        (row for row in everything if low <= row[1] < high), key=lambda row: row[1]
                    )
            batch = to_arrow(browse(seen, "jobs"))
            assert batch.schema == SCHEMA
            assert {row["key"] for row in batch.to_pylist()} == {b"tenant0", b"tenant1", b"tenant2", b"default"}
            assert queues_of(seen, 5) == ["jobs", "jobs2"]
            with pytest.raises(QueueNotFoundError):
                browse(seen, "none")
            with pytest.raises(InvalidArgumentError, match="not a cursor"):
                browse(seen, "jobs", after=b"?")
        jobs.ack(leased)


def test_recreated_queue_shows_no_old_messages(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.queue("jobs").enqueue(b"old")
        db.delete_queue("jobs")
        jobs = db.queue("jobs")
        with db.store.snapshot(*FAMILIES) as seen:
            assert (found(seen, "jobs"), times_of(seen, "jobs")) == ([], (0, 0))
        jobs.enqueue(b"young")
        with db.store.snapshot(*FAMILIES) as seen:
            assert [payload for payload, _ in found(seen, "jobs")] == [b"young"]


def test_browse_separates_priorities_from_fairness_keys(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        db.queue("ranked", priorities_max=9).enqueue(b"x", priority=5, fairness_key="tenant")
        with db.store.snapshot(*FAMILIES) as seen:
            (message,) = browse(seen, "ranked").messages
    assert (message.priority, message.fairness_key) == (5, "tenant")
