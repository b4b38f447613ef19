"""Ids are UUIDv7, unique, and sort in the order of creation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.errors import InvalidArgumentError
from basaltmq.ids import MANY_MAX, POOL_BYTES, Ids, are_gapless, check_id, format_id, parse_id

MS = 1_000_000


def id_time_ms(message_id: bytes) -> int:
    return int.from_bytes(message_id[:6], "big")


def clock(times_ms: list[int]) -> Callable[[], int]:
    """Return each time once, then the last one repeatedly."""
    left = list(times_ms)
    return lambda: (left.pop(0) if len(left) > 1 else left[0]) * MS


@pytest.mark.spec("C3")
@given(
    st.lists(st.integers(0, (1 << 48) - 2), min_size=1, max_size=20),
    st.lists(st.integers(0, 50), max_size=20),
    st.data(),
)
def test_ids_increase_whatever_the_clock_does(times_ms: list[int], sizes: list[int], data: st.DataObject) -> None:
    seed = data.draw(st.binary(min_size=1, max_size=8))
    ids = Ids(clock(times_ms), lambda n: (seed * n)[:n])
    made = [each for size in sizes for each in ids.many(size)]
    assert made == sorted(set(made))
    assert len(made) == sum(sizes)
    for each in made:
        parsed = UUID(bytes=each)
        assert parsed.version == 7
        assert parsed.variant == "specified in RFC 4122"


@pytest.mark.spec("C3")
def test_an_id_carries_the_time_it_was_made() -> None:
    ids = Ids(lambda: 1_700_000_000_123 * MS)
    assert id_time_ms(ids.next()) == 1_700_000_000_123


@pytest.mark.spec("C3")
def test_a_clock_that_moves_backwards_keeps_the_last_millisecond() -> None:
    ids = Ids(clock([1000, 10, 10, 1001]))
    made = [ids.next() for _ in range(4)]
    assert made == sorted(made)
    assert [id_time_ms(each) for each in made] == [1000, 1000, 1000, 1001]


@pytest.mark.spec("C3")
def test_an_exhausted_counter_increases_the_millisecond() -> None:
    ids = Ids(lambda: 1000 * MS, lambda n: b"\xff" * n)
    ids._begin(1000)
    ids._counter = (1 << 42) - 2
    made = ids.many(5)
    assert made == sorted(set(made))
    assert [id_time_ms(each) for each in made] == [1000, 1000, 1001, 1001, 1001]


@pytest.mark.spec("C3")
def test_the_counter_carries_from_its_low_into_its_high_bits() -> None:
    ids = Ids(lambda: 1000 * MS)
    ids._begin(1000)
    ids._counter = (1 << 30) - 2
    made = ids.many(4)
    assert made == sorted(set(made))
    assert [int.from_bytes(each[6:8], "big") & 0xFFF for each in made] == [0, 0, 1, 1]


@pytest.mark.spec("C3")
def test_ids_are_gapless_if_the_generator_made_no_other_between_them() -> None:
    ids = Ids(lambda: 1000 * MS)
    made = ids.many(9)
    assert are_gapless(made[0], made[-1], 9)
    assert are_gapless(made[2], made[4], 3)
    assert are_gapless(made[3], made[3], 1)
    assert not are_gapless(made[0], made[-1], 8)
    assert not are_gapless(made[2], made[4], 2)
    # It may return False where a counter overflows, but never True if an id lies between.
    ids._counter = (1 << 30) - 2
    carried = ids.many(4)
    assert not are_gapless(carried[0], carried[-1], 4)
    assert not are_gapless(carried[0], carried[-1], 3)


@pytest.mark.spec("C3")
def test_threads_share_a_generator_without_duplicates() -> None:
    ids = Ids()
    made: list[list[bytes]] = [[] for _ in range(4)]

    def work(into: list[bytes]) -> None:
        for _ in range(50):
            into += ids.many(20)

    threads = [threading.Thread(target=work, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(into == sorted(into) for into in made)
    assert len({each for into in made for each in into}) == 4 * 50 * 20


@given(st.binary(min_size=16, max_size=16))
def test_text_and_bytes_are_the_same_id(raw: bytes) -> None:
    assert format_id(raw) == str(UUID(bytes=raw))
    assert parse_id(format_id(raw)) == raw
    assert parse_id(format_id(raw).upper()) == raw


@pytest.mark.parametrize("text", ["", "x", "{" + "0" * 32 + "}", "0" * 32, "urn:uuid:" + "0" * 32, "0" * 36, "é" * 36])
def test_invalid_id_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not a message id"):
        parse_id(text)


@pytest.mark.parametrize("raw", [b"", b"x" * 15, b"x" * 17, "x" * 16, None])
def test_an_id_of_another_size_or_type_is_refused(raw: object) -> None:
    with pytest.raises(InvalidArgumentError, match="16 bytes"):
        check_id(raw)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [-1, MANY_MAX + 1])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(InvalidArgumentError, match="in one call"):
        Ids().many(count)


def test_a_clock_outside_48_bits_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="clock"):
        Ids(lambda: (1 << 48) * MS).next()


def test_random_bytes_are_read_in_blocks_and_never_reused_after_a_fork() -> None:
    asked: list[int] = []
    process = [1]

    def random_bytes(size: int) -> bytes:
        asked.append(size)
        return bytes([process[0]]) + len(asked).to_bytes(3, "big") * (size // 3 + 1)

    ids = Ids(lambda: 1000 * MS, lambda n: random_bytes(n)[:n], lambda: process[0])
    made = [message_id for _ in range(50) for message_id in ids.many(10)]
    assert asked == [POOL_BYTES]
    process[0] = 2
    ids.next()
    assert asked == [POOL_BYTES] * 2
    ids.next()
    assert asked == [POOL_BYTES] * 2
    assert len(ids.many(POOL_BYTES)) == POOL_BYTES
    assert asked[2:] == [4 * POOL_BYTES]
    assert sorted(set(made)) == made
    counted = iter(range(1 << 20))
    ids = Ids(lambda: 1000 * MS, lambda n: b"".join(next(counted).to_bytes(4, "big") for _ in range(n // 4)))
    tails = [message_id[-4:] for size in (1, 7, 300, 2040, 5) for message_id in ids.many(size)]
    assert len(set(tails)) == len(tails)
