"""Message ids are never used twice, and reserving them costs no write."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures.messages_world import WatchedStore, World

from basaltmq.errors import CorruptionError, StoreStalledError
from basaltmq.messages.sequence import NEXT_MESSAGE_ID, IdSequence, decode_next_id
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.store.memory import MemoryStore


def row(store: MemoryStore | WatchedStore) -> int:
    raw = store.get(Family.VERSION, NEXT_MESSAGE_ID)
    assert raw is not None
    return decode_next_id(raw)


def storing(message_id: int) -> Batch:
    batch = Batch()
    batch.put(Family.MESSAGE_METADATA, keys.metadata_key(message_id), b"")
    return batch


@pytest.mark.spec("A4")
def test_a_message_costs_one_write_also_where_a_block_begins() -> None:
    world = World(id_block=4)
    world.store.watch()
    for _ in range(10):
        world.put()
    assert len(world.store.batches) == 10
    carrying = [at for at, batch in enumerate(world.store.batches) if any(op[1] is Family.VERSION for op in batch.ops)]
    assert carrying == [0, 4, 8]
    world.close()


@pytest.mark.spec("A4")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_no_id_is_handed_out_twice_however_often_it_crashes(uses: list[int], block: int) -> None:
    store = MemoryStore()
    stored: list[int] = []
    for count in uses:
        sequence = IdSequence(store, block)
        for _ in range(count):
            message_id = sequence.take()
            assert not stored or message_id > max(stored)
            batch = storing(message_id)
            if sequence.covers(message_id):
                store.write(batch)
            else:
                sequence.write(batch)
            stored.append(message_id)
            gone = Batch()
            gone.delete(Family.MESSAGE_METADATA, keys.metadata_key(message_id))
            store.write(gone)
            assert row(store) > message_id
    assert len(set(stored)) == len(stored)


@pytest.mark.spec("A4")
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_batches_that_overtake_each_other_never_set_the_row_back(data: st.DataObject) -> None:
    store = MemoryStore()
    sequence = IdSequence(store, 3)
    waiting: list[int] = []
    done: list[int] = []
    for _ in range(30):
        if data.draw(st.booleans()) and waiting:
            message_id = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            if not sequence.covers(message_id):
                sequence.write(Batch())
            done.append(message_id)
            assert row(store) > max(done)
        else:
            waiting.append(sequence.take())


@pytest.mark.spec("A4")
def test_a_write_that_fails_reserves_nothing() -> None:
    store = WatchedStore(MemoryStore())
    sequence = IdSequence(store, 4)
    message_id = sequence.take()
    store.watch(fail_at=0)
    with pytest.raises(StoreStalledError):
        sequence.write(storing(message_id))
    assert not sequence.covers(message_id)
    assert store.get(Family.VERSION, NEXT_MESSAGE_ID) is None
    sequence.write(storing(message_id))
    assert sequence.covers(message_id)


@pytest.mark.spec("A4")
def test_a_row_set_back_by_hand_leads_to_no_id_in_use() -> None:
    store = MemoryStore()
    store.write(storing(41))
    assert IdSequence(store).take() == 42
    batch = Batch()
    batch.put(Family.VERSION, NEXT_MESSAGE_ID, b"short")
    store.write(batch)
    with pytest.raises(CorruptionError, match="nextMessageId"):
        IdSequence(store)


@pytest.mark.spec("A4")
def test_threads_that_publish_together_share_no_id_and_lose_none_at_reopen(tmp_path: Path) -> None:
    world = World(tmp_path / "store", id_block=3)
    failures: list[BaseException] = []

    def publish() -> None:
        try:
            for _ in range(15):
                world.put()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    entries = world.entries()
    assert len(entries) == 60
    world.reopen()
    assert world.entries() == entries
    assert world.put().id > max(message_id for _, message_id in entries)
    world.close()


@pytest.mark.spec("A4")
def test_a_loop_does_not_wait_for_a_thread_that_is_stuck_in_a_stall() -> None:
    sequence = IdSequence(MemoryStore())
    with sequence._writing, pytest.raises(StoreStalledError, match="try again"):
        sequence.write(Batch(), wait_ms=0)
