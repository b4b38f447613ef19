"""Requests assembled from received chunks."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from basaltmq.protocols.frame_buffer import PART_BYTES_MIN
from basaltmq.protocols.kafka.wire.inbox import SIZE, Inbox

SIZES = st.lists(st.sampled_from((0, 1, 3, 4, 5, 100, PART_BYTES_MIN, PART_BYTES_MIN + 1, 3 * PART_BYTES_MIN)))


@given(SIZES, st.lists(st.sampled_from((1, 2, 3, 4, 5, 97, PART_BYTES_MIN - 1, 2 * PART_BYTES_MIN)), min_size=1))
@example([PART_BYTES_MIN] * 3, [1])
@example([0, 0, 5], [PART_BYTES_MIN])
def test_requests_are_decoded_unchanged_for_any_fragmentation(sizes: list[int], cuts: list[int]) -> None:
    sent = [bytes([at & 0xFF]) * size for at, size in enumerate(sizes)]
    raw = b"".join(SIZE.pack(len(each)) + each for each in sent)
    inbox = Inbox()
    found: list[bytes] = []
    at = turn = 0
    while at < len(raw):
        cut = cuts[turn % len(cuts)]
        inbox.add(raw[at : at + cut])
        at, turn = at + cut, turn + 1
        while (size := inbox.request_bytes()) is not None and (request := inbox.take(size)) is not None:
            found.append(request)
        taken = sum(SIZE.size + len(each) for each in found)
        assert inbox.size_bytes == min(at, len(raw)) - taken
    assert found == sent
    assert inbox.request_bytes() is None


def test_single_bytes_are_joined_into_few_objects() -> None:
    inbox = Inbox()
    for byte in SIZE.pack(1 << 20) + bytes(5 * PART_BYTES_MIN):
        inbox.add(bytes([byte]))
    assert len(inbox._pieces) <= 11
    assert inbox.request_bytes() == 1 << 20
    assert inbox.take(1 << 20) is None
    inbox.clear()
    assert (inbox.size_bytes, inbox.request_bytes()) == (0, None)
