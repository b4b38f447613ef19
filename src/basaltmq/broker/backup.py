"""An online backup of a virtual host: the rows of its store and the log of its streams, of one moment."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from basaltmq.broker.consumers.stream_queue import LOG
from basaltmq.broker.vhost import VHost
from basaltmq.errors import InvalidArgumentError
from basaltmq.log.backup import copy_lane
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.shards import Engine


def backup_vhost(vhost: VHost, target: Path) -> None:
    """An openable copy at `target`, which must not exist. Call it in a thread; the virtual host serves meanwhile.

    Retention waits for it, and so does the creation of streams until the log is copied: a shard that the copied rows do
    not know would have its number given out again, to one that then inherits its frames.
    """
    if not isinstance(vhost.store, RocksStore):
        raise InvalidArgumentError(f"vhost {vhost.name!r} is kept in memory: there is nothing to back up")
    if not vhost.streams.is_open:
        vhost.store.checkpoint(target)
        return
    plane = vhost.streams.plane
    with vhost.streams.cleaning, ExitStack() as shards_as_they_are:
        shards_as_they_are.enter_context(plane.topics.lock)

        def copy_log(draft: Path) -> None:
            engine = plane.engines.get(Engine.SEGMENT)
            if isinstance(engine, SegmentEngine):
                for lane in engine.lanes:
                    copy_lane(lane.log, draft / LOG / lane.log.path.name)
            shards_as_they_are.close()

        vhost.store.checkpoint(target, beside=copy_log)
