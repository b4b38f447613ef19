"""Writes in an overlay hide, replace and add rows of the base store, and never reach it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.overlay import OverlayStore

A = Family.MESSAGES
BELOW = {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"}
KEYS = st.sampled_from([b"", b"a", b"aa", b"b", b"c", b"cc", b"d", b"e"])


def filled() -> MemoryStore:
    base = MemoryStore()
    batch = Batch()
    for key, value in BELOW.items():
        batch.put(A, key, value)
    base.write(batch)
    return base


@pytest.fixture
def base() -> Iterator[MemoryStore]:
    store = filled()
    yield store
    store.close()


def test_a_deleted_base_row_is_absent_from_every_kind_of_read(base: MemoryStore) -> None:
    over = OverlayStore(base)
    batch = Batch()
    batch.delete(A, b"b")
    over.write(batch)
    assert over.get(A, b"b") is None
    assert over.get_many(A, [b"a", b"b", b"c"]) == [b"1", None, b"3"]
    assert [key for key, _ in over.scan(A)] == [b"a", b"c", b"d"]
    assert [key for key, _ in over.scan(A, reverse=True)] == [b"d", b"c", b"a"]
    with over.snapshot(A) as snapshot:
        assert snapshot.get(A, b"b") is None
        assert [key for key, _ in snapshot.scan(A)] == [b"a", b"c", b"d"]


def test_the_base_store_never_changes_and_reappears_after_discard(base: MemoryStore) -> None:
    over = OverlayStore(base)
    batch = Batch()
    batch.put(A, b"a", b"other")
    batch.put(A, b"z", b"more")
    batch.delete_range(A, b"b", b"d")
    over.write(batch)
    assert dict(over.scan(A)) == {b"a": b"other", b"d": b"4", b"z": b"more"}
    assert dict(base.scan(A)) == BELOW
    over.discard()
    assert dict(over.scan(A)) == BELOW


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), KEYS, st.binary(max_size=2)),
            st.tuples(st.just("delete"), KEYS, st.just(b"")),
            st.tuples(st.just("range"), KEYS, KEYS),
        ),
        max_size=12,
    ),
    KEYS,
    st.none() | KEYS,
)
def test_two_layers_read_as_one_store(writes: list[tuple[str, bytes, bytes]], start: bytes, end: bytes | None) -> None:
    one, over = filled(), OverlayStore(filled())
    for kind, key, value in writes:
        batch = Batch()
        if kind == "put":
            batch.put(A, key, value)
        elif kind == "delete":
            batch.delete(A, key)
        else:
            batch.delete_range(A, key, value)
        one.write(batch)
        over.write(batch)
    for reverse in (False, True):
        assert list(over.scan(A, start, end, reverse=reverse)) == list(one.scan(A, start, end, reverse=reverse))
    keys = [key for _, key, _ in writes] + list(BELOW)
    assert over.get_many(A, keys) == one.get_many(A, keys)
