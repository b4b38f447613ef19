"""Lag report: lag of consumer groups, backlog of queues, and the time until they are empty.

Two measurements give the rates; one gives only the backlog. The job does not need Spark: it reads one row per group and
partition, and one per queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import msgspec

from basaltmq.pipeline.source import Topics, open_topics
from basaltmq.pipeline.store_path import DEFAULT_VHOST, store_path
from basaltmq.queues.stats import QueueStats
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as queue_keys
from basaltmq.store.open import open_view


class GroupLag(msgspec.Struct, frozen=True):
    group: str
    topic: str
    partition: int
    committed: int
    end_offset: int
    lag: int
    read_per_s: float | None = None
    drains_in_s: float | None = None
    """At the present read and write rates. None if unknown or never."""


class QueueBacklog(msgspec.Struct, frozen=True):
    queue: str
    messages: int
    size_bytes: int
    delayed: int
    acked_per_s: float | None = None
    drains_in_s: float | None = None


class Lag(msgspec.Struct, frozen=True):
    groups: list[GroupLag]
    queues: list[QueueBacklog]


def lag(
    source: str | Mapping[str, str],
    *,
    groups: list[str] | None = None,
    pace_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Lag:
    """Return lag and backlog. With `pace_s`, a second measurement after this time gives the rates.

    `source` is a path, or options of the basalt source. A broker gives only groups.
    """
    location = {"path": source} if isinstance(source, str) else source
    store = store_path(location["path"], location.get("vhost", DEFAULT_VHOST)) if "path" in location else None
    with open_topics(location) as view:
        first = _groups(view, groups)
        counted = _queues(store)
        if pace_s is None:
            return Lag(list(first.values()), [_backlog(name, stats) for name, stats in counted.items()])
        sleep(pace_s)
        view.refresh()
        second = _groups(view, groups)
    recounted = _queues(store)
    return Lag(
        [_with_rates(each, first.get(at), pace_s) for at, each in second.items()],
        [_backlog(name, stats, counted.get(name), pace_s) for name, stats in recounted.items()],
    )


def _groups(view: Topics, wanted: list[str] | None) -> dict[tuple[str, str, int], GroupLag]:
    return {
        (group, each.topic, each.partition): GroupLag(
            group, each.topic, each.partition, each.committed, each.end_offset, each.lag
        )
        for group in (view.groups() if wanted is None else wanted)
        for each in view.lag(group)
    }


def _queues(store: Path | None) -> dict[str, QueueStats]:
    if store is None:
        return {}
    with closing(open_view(store)) as rows:
        return {
            queue_keys.decode_queue_stats_key(key): QueueStats.decode(queue_keys.decode_queue_stats_key(key), raw)
            for key, raw in rows.scan(Family.QUEUE_STATS)
        }


def _with_rates(each: GroupLag, before: GroupLag | None, pace_s: float) -> GroupLag:
    if before is None:
        return each
    read_per_s = (each.committed - before.committed) / pace_s
    gained_per_s = (before.lag - each.lag) / pace_s
    return msgspec.structs.replace(each, read_per_s=read_per_s, drains_in_s=_drains_in_s(each.lag, gained_per_s))


def _backlog(
    name: str, stats: QueueStats, before: QueueStats | None = None, pace_s: float | None = None
) -> QueueBacklog:
    found = QueueBacklog(name, stats.messages, stats.size_bytes, stats.delayed)
    if before is None or pace_s is None:
        return found
    gained_per_s = (before.messages - stats.messages) / pace_s
    return msgspec.structs.replace(
        found,
        acked_per_s=(stats.acked - before.acked) / pace_s,
        drains_in_s=_drains_in_s(stats.messages, gained_per_s),
    )


def _drains_in_s(backlog: int, gained_per_s: float) -> float | None:
    if backlog == 0:
        return 0.0
    return backlog / gained_per_s if gained_per_s > 0 else None
