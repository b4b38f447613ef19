"""Repairs the rows of all planes after `store.repair` removed unreadable rows.

Streams are repaired before the catalog. A topic whose object is lost is restored from its shards and the name index,
which the catalog's repair rebuilds. Queues are repaired after streams, because a queue without messages may be a stream
queue, whose records are in a topic.
"""

from __future__ import annotations

import time
from pathlib import Path

from basaltmq.catalog.reconcile import reconcile_catalog
from basaltmq.clock import NS_PER_MS
from basaltmq.queues.recovery.reconcile import reconcile_queues
from basaltmq.store.api import Store
from basaltmq.store.directory import LOG
from basaltmq.store.salvage.losses import Losses
from basaltmq.store.salvage.naming import Loss
from basaltmq.streams.reconcile import reconcile_streams, single_partition_topics


def reconcile_planes(store: Store, losses: Losses, path: Path) -> list[Loss]:
    """Make the rows of all planes consistent. Return the losses. `path` is the directory of the store."""
    now_ns = time.time_ns()
    streams = reconcile_streams(store, losses, path / LOG, now_ns // NS_PER_MS)
    queues = reconcile_queues(store, losses, now_ns, single_partition_topics(store))
    return [*queues, *streams, *reconcile_catalog(store, losses)]
