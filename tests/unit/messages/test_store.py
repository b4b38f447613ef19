"""Messages come back as they went in, in pieces or whole, and go without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures.messages_world import QUEUE_A, QUEUE_B, QUEUE_C, World

from basaltmq.errors import (
    CorruptionError,
    InvalidArgumentError,
    LimitExceededError,
    MessageNotFoundError,
    StoreOverfullError,
    TransactionError,
)
from basaltmq.messages import stored
from basaltmq.messages.metadata import (
    COMPLETE,
    METADATA_BYTES_MAX,
    UNFINISHED,
    Metadata,
    decode_metadata,
    encode_metadata,
    is_visible,
)
from basaltmq.messages.stored import StoredMessage
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.transactions.transaction import Transaction

SMALL = 4  # chunks of 16 bytes


@pytest.fixture(params=["memory", "rocks"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "store" if request.param == "rocks" else None, chunk_shift=SMALL)
    yield made
    made.close()


@pytest.mark.spec("A4")
@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=50), max_size=12),
    offset=st.integers(0, 400),
    length=st.none() | st.integers(0, 400),
    spill_bytes=st.sampled_from([16, 64, 1 << 20]),
)
def test_content_written_in_pieces_reads_back_from_any_offset(
    pieces: list[bytes], offset: int, length: int | None, spill_bytes: int
) -> None:
    whole = b"".join(pieces)
    expected = whole[offset:] if length is None else whole[offset : offset + length]
    with patch.object(stored, "SPILL_BYTES", spill_bytes):
        world = World(chunk_shift=SMALL)
        writer = world.messages.add_message(b"meta", kind=7)
        for piece in pieces:
            writer.add_content(piece)
        message = writer.finish()
        assert message.get_content(offset, length) == expected
        with Transaction(world.messages) as transaction:
            transaction.enqueue(QUEUE_A, message)
            transaction.commit()
        assert message.get_content(offset, length) == expected
        world.reopen()
        again = world.messages.get_message(message.id)
        assert (again.metadata, again.kind, again.content_bytes) == (b"meta", 7, len(whole))
        assert again.get_content(offset, length) == expected
        assert all(len(piece) <= 16 for piece in again.content_pieces())
        world.messages.remove(again)
        assert [family for family, _ in world.rows()] == ["queue_entries"]
        world.close()


@pytest.mark.spec("A4")
@pytest.mark.promise("P8")
def test_a_writer_never_holds_more_than_its_limit_and_a_piece(world: World) -> None:
    with patch.object(stored, "SPILL_BYTES", 64), patch.object(stored, "SPILL_BATCH_BYTES", 32):
        writer = world.messages.add_message(b"")
        for at in range(50):
            writer.add_content(bytes([at]) * 40)
            held = sum(map(len, writer._pending.chunks)) + writer._tail_bytes
            assert held <= 64 + 40 + 16
        message = writer.finish()
        assert message.pending_bytes <= 64 + 40 + 16
        assert max(batch.size_bytes() for batch in world.store.batches) < 150
        assert message.get_content() == b"".join(bytes([at]) * 40 for at in range(50))


@pytest.mark.spec("A4")
@pytest.mark.promise("P2")
def test_a_message_is_invisible_until_its_transaction_commits_even_when_it_spilled(world: World) -> None:
    with patch.object(stored, "SPILL_BYTES", 64):
        writer = world.messages.add_message(b"")
        writer.add_content(b"x" * 200)
        message = writer.finish()
    assert world.rows()
    seen: list[int] = []
    world.messages.visit_messages(lambda found: seen.append(found.id))
    assert seen == []
    with pytest.raises(MessageNotFoundError, match=str(message.id)):
        world.messages.get_message(message.id)
    message.discard()
    assert world.rows() == {}
    with pytest.raises(MessageNotFoundError):
        message.get_content()


@pytest.mark.spec("A4")
def test_a_discarded_writer_leaves_nothing_and_takes_nothing_more(world: World) -> None:
    with patch.object(stored, "SPILL_BYTES", 64):
        writer = world.messages.add_message(b"")
        writer.add_content(b"x" * 200)
        writer.add_content(b"x")
    assert world.rows()
    writer.discard()
    writer.discard()
    assert world.rows() == {}
    with pytest.raises(TransactionError, match="finished or discarded"):
        writer.add_content(b"more")


@pytest.mark.spec("A4")
def test_a_spill_that_fails_takes_nothing_and_can_be_made_again(world: World) -> None:
    with patch.object(stored, "SPILL_BYTES", 32):
        writer = world.messages.add_message(b"")
        writer.add_content(b"a" * 40)
        world.store.watch(fail_at=0)
        with pytest.raises(Exception, match="injected"):
            writer.add_content(b"b" * 8)
        writer.add_content(b"b" * 8)
        message = writer.finish()
    assert message.get_content() == b"a" * 40 + b"b" * 8


@pytest.mark.spec("A4")
@pytest.mark.promise("P8")
def test_limits_are_refused_by_name(world: World) -> None:
    with pytest.raises(LimitExceededError, match=str(METADATA_BYTES_MAX)):
        world.messages.add_message(b"x" * (METADATA_BYTES_MAX + 1))
    with pytest.raises(InvalidArgumentError, match="bytes"):
        world.messages.add_message("text")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="0 to 255"):
        world.messages.add_message(b"", kind=256)
    world.messages.content_bytes_max = 10
    writer = world.messages.add_message(b"")
    writer.add_content(b"x" * 10)
    with pytest.raises(LimitExceededError, match="limit of 10"):
        writer.add_content(b"x")
    assert writer.finish().get_content() == b"x" * 10
    with pytest.raises(InvalidArgumentError, match="64 bits"):
        world.messages.get_message(-1)
    with pytest.raises(InvalidArgumentError, match="negative"):
        world.put().get_content(-1)


@pytest.mark.spec("A11")
def test_an_overfull_store_takes_no_message() -> None:
    class Full:
        overfull = True

    world = World(guard=Full())
    with pytest.raises(StoreOverfullError, match="size limit"):
        world.messages.add_message(b"")
    world.close()


@pytest.mark.spec("A7")
def test_visits_go_in_order_and_stop_when_told(world: World) -> None:
    ids = [world.put(queue).id for queue in (QUEUE_B, QUEUE_A, QUEUE_B, QUEUE_C)]
    seen: list[int] = []
    world.messages.visit_messages(lambda message: seen.append(message.id))
    assert seen == ids == sorted(ids)
    assert world.entries() == [(QUEUE_A, ids[1]), (QUEUE_B, ids[0]), (QUEUE_B, ids[2]), (QUEUE_C, ids[3])]
    of_b: list[int] = []
    world.messages.visit_message_instances(lambda queue_id, message_id: of_b.append(message_id), QUEUE_B)
    assert of_b == [ids[0], ids[2]]

    def stop(*found: object) -> bool:
        seen.append(0)
        return False

    for visit in (world.messages.visit_messages, world.messages.visit_message_instances):
        seen.clear()
        world.store.watch()
        visit(stop)
        assert seen == [0]
        assert world.store.rows_scanned == 1


@pytest.mark.spec("A4")
@pytest.mark.promise("P7")
def test_a_missing_or_short_chunk_is_named(world: World) -> None:
    message = world.put(content=b"x" * 40)
    batch = Batch()
    batch.delete(Family.MESSAGE_CONTENT, keys.content_key(message.id, 1))
    batch.put(Family.MESSAGE_CONTENT, keys.content_key(message.id, 2), b"x")
    world.store.write(batch)
    again = world.messages.get_message(message.id)
    assert again.get_content(0, 16) == b"x" * 16
    with pytest.raises(CorruptionError, match=f"chunk 1 of message {message.id} is missing"):
        again.get_content(0, 17)
    with pytest.raises(CorruptionError, match=f"chunk 2 of message {message.id} has 1 bytes"):
        again.get_content(32)


@pytest.mark.spec("A4")
@given(
    st.builds(
        Metadata,
        st.sampled_from([COMPLETE, UNFINISHED]),
        st.integers(4, 26),
        st.integers(0, 255),
        st.integers(0, 1 << 40),
        st.binary(max_size=40),
    )
)
def test_metadata_rows_round_trip_and_refuse_truncation(row: Metadata) -> None:
    raw = encode_metadata(row)
    assert decode_metadata(1, raw) == row
    assert is_visible(raw) == (row.state == COMPLETE)
    for size in range(12):
        with pytest.raises(CorruptionError, match="message 1"):
            decode_metadata(1, raw[:size])
        assert not is_visible(raw[:size])
    for at, wrong in ((0, 9), (1, 9), (2, 60)):
        with pytest.raises(CorruptionError, match="message 1"):
            decode_metadata(1, raw[:at] + bytes([wrong]) + raw[at + 1 :])


@pytest.mark.spec("A4")
def test_a_message_of_many_queues_is_stored_once(world: World) -> None:
    message = world.finished(b"x" * 100)
    with Transaction(world.messages) as transaction:
        for queue in (QUEUE_A, QUEUE_B, QUEUE_C):
            transaction.enqueue(queue, message)
        transaction.commit()
    families = [family for family, _ in world.rows()]
    assert families.count("message_metadata") == 1
    assert families.count("message_content") == 7
    assert families.count("queue_entries") == 3
    assert isinstance(world.messages.get_message(message.id), StoredMessage)
