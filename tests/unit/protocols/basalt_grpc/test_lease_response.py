"""The response of a lease, assembled from rows, equals protobuf's encoding of its messages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basaltmq.durability import Durability
from basaltmq.protocols.grpc.services.basalt.lease_response import lease_response
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.leases.delivery import Deliveries
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.varints import varint
from basaltmq.wire import basalt_pb2 as wire

WORDS = st.text("abcé ", max_size=6)
DRAFTS = st.builds(
    Draft,
    payload=st.one_of(st.binary(max_size=300), st.just(bytes(200_000))),
    headers=st.dictionaries(WORDS, WORDS, max_size=2),
    properties=st.binary(max_size=10),
    fairness_key=WORDS,
    weight=st.integers(1, 1000),
    priority=st.integers(0, 9),
    throttle_keys=st.lists(st.text("ab", min_size=1, max_size=3), max_size=2, unique=True).map(tuple),
)


@pytest.mark.spec("C4")
@settings(max_examples=60)
@given(st.lists(st.one_of(st.binary(max_size=300), DRAFTS), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_the_response_contains_the_enqueued_messages(
    drafts: list[Draft | bytes], has_priorities: bool, has_failed: bool
) -> None:
    store = MemoryStore()
    commit = GroupCommit(store)
    with QueuePlane(store, commit) as plane:
        plane.create(QueueConfig(name="q", priorities_max=5 if has_priorities else 0))
        ids = plane.enqueue("q", drafts, durability=Durability.WRITTEN)
        if has_failed:
            plane.nack("q", plane.lease("q", 100)[0].token)
        found = plane.lease_ready("q", 100)
        answer = wire.LeaseResponse.FromString(lease_response(found, 30_000))
        one_by_one = wire.LeaseResponse.FromString(lease_response(list(found), 30_000))
        messages = [each.message() for each in found]
    commit.close()
    assert answer == one_by_one
    assert (answer.token, answer.visibility_ms) == (found[0].token, 30_000)
    assert {each.id for each in answer.messages} == set(ids)
    sent = dict(zip(ids, drafts, strict=True))
    for got, message in zip(answer.messages, messages, strict=True):
        draft = sent[got.id]
        whole = Draft(payload=draft) if isinstance(draft, bytes) else draft
        assert got.payload == whole.payload
        assert dict(got.headers) == whole.headers
        assert got.fairness_key == whole.fairness_key
        assert (got.weight, got.attempts) == (whole.weight, int(has_failed))
        assert (got.priority, got.enqueued_ns) == (message.priority, message.enqueued_ns)


@pytest.mark.parametrize("sizes", [(10, 10, 10), (10, 300, 10), (0, 0), (5,)])
def test_encoding_columns_creates_no_delivery_objects(sizes: tuple[int, ...]) -> None:
    store = MemoryStore()
    commit = GroupCommit(store)
    with QueuePlane(store, commit) as plane:
        plane.create(QueueConfig(name="q"))
        payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
        plane.enqueue("q", payloads, durability=Durability.WRITTEN)
        found = plane.lease_ready("q", 100)
        assert type(found) is Deliveries
        answer = wire.LeaseResponse.FromString(lease_response(found, 1))
        assert found._made is None
        last = found[-1]
        assert [each.payload for each in answer.messages] == payloads
        assert [each.payload for each in found] == payloads
        assert [each.id for each in answer.messages] == [each.id for each in found]
        assert last == found[-1] == list(found)[-1]
        assert list(found[1:]) == list(found)[1:]
        assert plane.ack("q", found[0].token, [each.id for each in found]) == len(sizes)
    commit.close()


def test_messages_that_differ_only_in_key_or_time_are_distinguished() -> None:
    store = MemoryStore()
    commit = GroupCommit(store)
    with QueuePlane(store, commit) as plane:
        plane.create(QueueConfig(name="q"))
        for key in ("a", "b", "a"):
            plane.enqueue("q", [Draft(payload=b"same", fairness_key=key)], durability=Durability.WRITTEN)
        found = plane.lease("q", 10)
        answer = wire.LeaseResponse.FromString(lease_response(found, 1))
        messages = [each.message() for each in found]
    commit.close()
    assert sorted(each.fairness_key for each in answer.messages) == ["a", "a", "b"]
    assert [each.enqueued_ns for each in answer.messages] == [each.enqueued_ns for each in messages]
    assert len({each.enqueued_ns for each in answer.messages}) == 3


@given(st.integers(0, (1 << 64) - 1))
def test_numbers_are_encoded_as_by_protobuf(value: int) -> None:
    assert b"\x08" + varint(value) == (wire.LeaseResponse(token=value).SerializeToString() or b"\x08\x00")
