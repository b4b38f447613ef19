"""A batch that is parsed without protobuf equals protobuf's result. All other requests are left to protobuf."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from basaltmq.client.requests import enqueue_of
from basaltmq.protocols.grpc.services.basalt.payloads import payloads_of
from basaltmq.wire import basalt_pb2 as wire

QUEUES = st.one_of(st.text("ab-é", max_size=8), st.just("q" * 127), st.just("q" * 128))
BATCHES = st.one_of(
    st.lists(st.binary(max_size=300), max_size=5),
    st.builds(lambda payload, count: [payload] * count, st.binary(max_size=20_000), st.integers(1, 40)),
    st.integers(0, 200).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=10)),
)


def agree(raw: bytes) -> bool:
    """Return whether the fast parser read a request, and check that both results are equal."""
    for given_as in (raw, memoryview(raw)):
        found = payloads_of(given_as)
        if found is None:
            continue
        queue, payloads = found
        assert payloads
        assert {*map(type, payloads)} == {bytes}
        try:
            request = wire.EnqueueBatchRequest.FromString(raw)
        except DecodeError:
            pytest.fail(f"protobuf refuses {raw[:80]!r}")
        assert (request.queue, list(request.payloads)) == (queue, payloads)
        assert request == wire.EnqueueBatchRequest(queue=queue, payloads=payloads), "nothing else is in it"
    return found is not None


@given(QUEUES, BATCHES)
@example("", [b""])
@example("q", [b"", b""])
@example("q" * 127 + "\x1a", [bytes(25)])
@settings(max_examples=150)
def test_payloads_of_one_size_are_decoded_as_by_protobuf(queue: str, payloads: list[bytes]) -> None:
    raw = wire.EnqueueBatchRequest(queue=queue, payloads=payloads).SerializeToString()
    is_plain = 0 < len(queue) < 128 and queue.isascii() and len({*map(len, payloads)}) == 1
    assert agree(raw) is is_plain


@pytest.mark.parametrize("size", [0, 1, 127, 128, 1_024, 16_383, 16_384, 300_000, 1 << 21])
def test_requests_of_the_basalt_client_are_decoded(size: int) -> None:
    assert agree(enqueue_of("jobs", [bytes(size)] * 3))


@given(
    st.binary(max_size=40),
    st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 255)), max_size=3),
    st.integers(0, 2_000),
    st.integers(1, 8),
    st.integers(0, 150),
)
@settings(max_examples=300)
def test_modified_bytes_are_refused_or_decoded_as_by_protobuf(
    noise: bytes, flips: list[tuple[int, int]], cut: int, count: int, size: int
) -> None:
    raw = bytearray(enqueue_of("jobs", [bytes(range(256))[:size]] * count))
    for at, value in flips:
        raw[at % len(raw)] = value
    agree(bytes(raw[: cut or None]) + noise)


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_random_bytes_are_refused_or_decoded_as_by_protobuf(raw: bytes) -> None:
    for begun in (raw, b"\x0a\x01q\x1a" + raw, b"\x0a\x00\x1a\x80\x80\x80" + raw):
        agree(begun)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x0a",
        b"\x0a\x05jobs\x1a",
        b"\x0a\x04jobs",
        b"\x0a\x04jobs\x1a",
        b"\x0a\x04jobs\x1a\x05abcd",
        b"\x0a\x04jobs\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0a\x04job\xff\x1a\x01a",
        b"\x1a\x01a\x0a\x04jobs",
        b"\x0a\x04jobs\x1a\x01a\x20\x07",
        b"\x0a\x04jobs\x12\x03\x0a\x01a",
        b"\x0a\x04jobs\x1a\x01a\x0a\x05other",
    ],
    ids=[
        "nothing",
        "half a tag",
        "a queue too short",
        "no payload",
        "half a head",
        "half a payload",
        "a length beyond all",
        "a name that is no text",
        "another order",
        "an unknown field",
        "a draft",
        "a second name",
    ],
)
def test_other_requests_are_left_to_protobuf(raw: bytes) -> None:
    assert payloads_of(raw) is None
    assert payloads_of(memoryview(raw)) is None
