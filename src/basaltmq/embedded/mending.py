"""What a repair of a store leaves to the planes: rows that do not fit together any more (`store.repair`).

Streams come before the catalog: a topic whose object is lost is made again from its shards and the name index, which
the catalog then makes anew.
"""

from __future__ import annotations

import time
from pathlib import Path

from basaltmq.catalog.mend import mend_catalog
from basaltmq.embedded.database import LOG
from basaltmq.messages.mend import mend_messages
from basaltmq.queues.recovery.mend import mend_queues
from basaltmq.store.api import Store
from basaltmq.store.salvage.losses import Losses
from basaltmq.store.salvage.naming import Loss
from basaltmq.streams.mend import mend_streams


def mend_planes(store: Store, losses: Losses, path: Path) -> list[Loss]:
    """Bring the rows of all planes in line; what that cost. `path` is the directory of the store."""
    now_ns = time.time_ns()
    return [
        *mend_queues(store, losses, now_ns),
        *mend_messages(store, losses),
        *mend_streams(store, losses, path / LOG, now_ns // 1_000_000),
        *mend_catalog(store, losses),
    ]
