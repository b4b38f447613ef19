"""Reads and writes the rows of subscriptions."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from basaltmq.store.api import Reader
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.offsets import Commit, put_commit
from basaltmq.streams.pop.lease import Lease
from basaltmq.streams.pop.subscription import Held, Subscription


def read_subscription(
    store: Reader, group: str, topic_id: UUID, partitions: int, now_ms: int, new_token: Callable[[], int], held: Held
) -> Subscription:
    """Return the stored state of a group on a topic."""
    leases = []
    rows = key_parts.prefix_range(stream_keys.pop_lease_prefix(topic_id, group))
    for key, raw in store.scan(Family.POP_LEASES, *rows):
        _, _, partition, offset = stream_keys.decode_pop_lease_key(key)
        leases.append(Lease.decode(partition, offset, raw))
    return Subscription(read_cursors(store, group, topic_id, partitions), leases, now_ms, new_token, held)


def read_cursors(store: Reader, group: str, topic_id: UUID, partitions: int) -> dict[int, int]:
    """Return the committed offsets of a group. They are its cursors, which an operator may reset."""
    keys = [stream_keys.consumer_offset_key(group, topic_id, each) for each in range(partitions)]
    rows = store.get_many(Family.CONSUMER_OFFSETS, keys)
    return {partition: Commit.decode(raw).offset for partition, raw in enumerate(rows) if raw is not None}


def put_changes(batch: Batch, group: str, topic_id: UUID, subscription: Subscription, now_ms: int) -> None:
    """Add the changes since the last call to `batch`."""
    for (partition, offset), lease in subscription.changed.items():
        key = stream_keys.pop_lease_key(topic_id, group, partition, offset)
        if lease is None:
            batch.delete(Family.POP_LEASES, key)
        else:
            batch.put(Family.POP_LEASES, key, lease.encode())
    for partition in subscription.moved:
        put_commit(batch, group, topic_id, partition, Commit(subscription.cursors[partition], now_ms))
    subscription.changed.clear()
    subscription.moved.clear()
