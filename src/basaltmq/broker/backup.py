"""Online backup of a virtual host: a consistent copy of its store and its stream log."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from basaltmq.broker.vhost import VHost
from basaltmq.errors import InvalidArgumentError
from basaltmq.log.backup import copy_lane
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.view import LOG


def backup_vhost(vhost: VHost, target: Path) -> None:
    """Write an openable copy to `target`, which must not exist. Call it in a thread; the virtual host stays in service.

    Retention waits for the backup. Stream creation waits until the log is copied. Otherwise the copied log could
    contain frames of a shard that the copied rows lack. Another shard would then reuse its number and get these frames.
    """
    if not isinstance(vhost.store, RocksStore):
        raise InvalidArgumentError(f"cannot back up vhost {vhost.name!r}: its store is in memory, not on disk")
    if not vhost.streams.is_open:
        vhost.store.checkpoint(target)
        return
    plane = vhost.streams.plane
    with vhost.streams.cleaning, ExitStack() as shards_as_they_are:
        shards_as_they_are.enter_context(plane.topics.lock)

        def copy_log(draft: Path) -> None:
            engine = vhost.streams.segments()
            for lane in () if engine is None else engine.lanes:
                copy_lane(lane.log, draft / LOG / lane.log.path.name)
            shards_as_they_are.close()

        vhost.store.checkpoint(target, add_files=copy_log)
