"""Parts of an incomplete message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.protocols.frame_buffer import PART_BYTES_MIN, add_part


@pytest.mark.promise("P8")
@given(st.lists(st.integers(0, 2 * PART_BYTES_MIN).map(bytes), max_size=40))
def test_parts_keep_their_bytes_and_are_few(pieces: list[bytes]) -> None:
    parts: list[bytes] = []
    for piece in pieces:
        add_part(parts, piece)
    whole = b"".join(pieces)
    assert b"".join(parts) == whole
    assert len(parts) <= 2 + 2 * len(whole) // PART_BYTES_MIN
