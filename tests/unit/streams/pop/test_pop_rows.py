"""Rows of leases: decoded as encoded, and deleted with their topic."""

from __future__ import annotations

from itertools import count

import pytest

from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.pop.rows import put_changes, read_subscription
from basaltmq.streams.pop.subscription import Held
from basaltmq.streams.shards import Engine
from basaltmq.streams.topics import TopicConfig

pytestmark = pytest.mark.spec("G3", "D4")


def test_leases_are_read_back_and_deleted_with_their_topic() -> None:
    store = MemoryStore()
    plane = StreamPlane(store, lambda: 1)
    config = TopicConfig(engine=Engine.ROCKSDB)
    gone, kept = plane.topics.create("gone", config), plane.topics.create("kept", config)
    tokens = count(1)
    for topic in (gone, kept):
        state = read_subscription(store, "g", topic.id, 1, 0, lambda: next(tokens), Held())
        state.hold(state.admit(0, 5, b"group"), 0, 100)
        state.advance(0, 6)
        batch = Batch()
        put_changes(batch, "g", topic.id, state, 0)
        store.write(batch)
        again = read_subscription(store, "g", topic.id, 1, 0, lambda: next(tokens), Held())
        assert again.cursors == {0: 6}
        assert again.leases[0, 5].encode() == state.leases[0, 5].encode()
    plane.topics.delete("gone")
    left = [key for key, _ in store.scan(Family.POP_LEASES)]
    assert [key[:16] for key in left] == [kept.id.bytes]
    plane.close()
