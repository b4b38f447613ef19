"""Commits the progress of a query to a consumer group, so that its lag is visible like that of other consumers."""

from __future__ import annotations

from basaltmq.clock import now_ms
from basaltmq.errors import StoreLockedError
from basaltmq.pipeline.store_path import store_path
from basaltmq.store.open import open_store
from basaltmq.streams.plane import StreamPlane
from pyspark_basalt.connection import StoreLocation
from pyspark_basalt.offsets import Offsets
from pyspark_basalt.views import remote_of


def commit_group(location: StoreLocation, group: str, offsets: Offsets) -> None:
    """Commit the next offsets of a group. They are durable on return."""
    if location.login is not None:
        remote_of(location.login).commit_group(group, offsets)
        return
    try:
        store = open_store(store_path(location.path, location.vhost), create=False)
    except StoreLockedError as error:
        raise StoreLockedError(
            f'{error}. commitGroup with path needs write access to the store: use server="http://host:15672", '
            "or remove commitGroup"
        ) from None
    try:
        plane = StreamPlane(store, now_ms)
        try:
            topics = {name: plane.topics.find(name) for name in offsets}
            commits = {
                (topic.id, number): at
                for name, topic in topics.items()
                if topic is not None
                for number, at in offsets[name].items()
            }
            if commits:
                plane.offsets.commit(group, dict(commits))
        finally:
            plane.close()
    finally:
        store.close()
