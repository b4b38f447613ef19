"""Requests of both clients: batches as protobuf encodes them, and message ids only where necessary."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from basaltmq.client import Client
from basaltmq.client.leased import Leased, by_lease, extended, ids_of, leased_of, settled
from basaltmq.client.requests import Payload, batch_of, enqueue_of
from basaltmq.errors import InvalidArgumentError, UnavailableError
from basaltmq.queues.draft import Draft
from basaltmq.wire import basalt_pb2 as wire

PAYLOADS = st.one_of(st.binary(max_size=200), st.text("aé", max_size=5), st.just(Draft(payload=b"d", priority=3)))


def lease(count: int, *, token: int = 7, queue: str = "q") -> list[Leased]:
    messages = [wire.Message(id=bytes([number]) * 16, payload=b"p") for number in range(count)]
    return leased_of(queue, wire.LeaseResponse(token=token, visibility_ms=30_000, messages=messages))


@pytest.mark.spec("C4")
@settings(max_examples=80)
@given(st.text("qé", max_size=4), st.lists(PAYLOADS, max_size=6))
@example("q", [b"same"] * 3)
@example("q", [b"", bytes(127), bytes(128), bytes(20_000)])
@example("q" * 200, [b""])
def test_batches_are_encoded_as_by_protobuf(queue: str, messages: list[Payload]) -> None:
    raw = enqueue_of(queue, messages)
    assert wire.EnqueueBatchRequest.FromString(raw) == batch_of(queue, messages)


def test_unsupported_message_types_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="bytearray"):
        enqueue_of("q", [b"fine", bytearray(b"not")])  # type: ignore[list-item]


def test_a_complete_lease_is_settled_without_listing_its_messages() -> None:
    held = lease(3)
    assert ids_of(held) == []
    assert ids_of(held[::-1]) == []
    assert by_lease(held) == {("q", 7): held}


@pytest.mark.promise("P2")
def test_a_partial_lease_is_settled_by_listing_its_messages() -> None:
    held = lease(3)
    a, b, c = (each.id for each in held)
    assert ids_of(held[:2]) == [a, b]
    # One message is named twice, which the broker refuses. The client must not take this for the whole lease.
    assert ids_of([held[0], held[1], held[1]]) == [a, b, b]
    settled(held[:1])
    assert ids_of(held) == [a, b, c]


@pytest.mark.promise("P2")
def test_after_a_partial_extension_both_parts_are_settled_by_listing() -> None:
    held = lease(3)
    extended(held, 7)
    assert ids_of(held) == []
    extended(held[:1], 8)
    assert {key: ids_of(part) for key, part in by_lease(held).items()} == {
        ("q", 8): [held[0].id],
        ("q", 7): [held[1].id, held[2].id],
    }


def test_messages_of_several_leases_are_settled_separately() -> None:
    one, other = lease(2), lease(2, token=9)
    assert by_lease([one[0], other[0], one[1]]) == {("q", 7): one, ("q", 9): other[:1]}
    with pytest.raises(InvalidArgumentError, match="bytes"):
        by_lease([one[0], b"not"])  # type: ignore[list-item]


def test_an_unreachable_broker_is_named_with_its_port() -> None:
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(UnavailableError, match=r"start the broker, or use its gRPC port"),
    ):
        client.enqueue("jobs", b"work")
