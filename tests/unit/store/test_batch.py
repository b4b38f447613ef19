"""A batch of single operations and columns: every reader sees one order, and every store writes the same rows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from basaltmq.errors import InvalidArgumentError
from basaltmq.store.batch import DELETE, PUT, Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store

A, B = Family.MESSAGES, Family.MESSAGE_CONTENT


def mixed(chance: random.Random) -> tuple[Batch, Batch]:
    """Return the same operations twice: as columns, and as single operations."""
    columns, single = Batch(), Batch()
    for _ in range(chance.randrange(1, 30)):
        family = chance.choice([A, B])
        keys = [b"%d" % chance.randrange(12) for _ in range(chance.randrange(5))]
        values = [b"%d" % chance.randrange(1000) for _ in keys]
        kind = chance.randrange(5)
        if kind == 0:
            columns.put_many(family, keys, values)
            for key, value in zip(keys, values, strict=True):
                single.put(family, key, value)
        elif kind == 1:
            columns.delete_many(family, keys)
            for key in keys:
                single.delete(family, key)
        elif kind == 2:
            columns.delete_range(family, b"3", b"7")
            single.delete_range(family, b"3", b"7")
        else:
            for each in (columns, single):
                each.put(family, b"5", b"%d" % kind)
                each.delete(family, b"1")
    return columns, single


@pytest.mark.promise("P2")
@pytest.mark.parametrize("seed", range(20))
def test_columns_keep_their_position_among_single_operations(seed: int) -> None:
    columns, single = mixed(random.Random(seed))
    assert len(columns) == len(single)
    assert bool(columns) is bool(single.ops)
    both, alone = Batch(), Batch()
    for each in (columns, columns):
        both.extend(each)
    for each in (single, single):
        alone.extend(each)
    assert columns.size_bytes() == single.size_bytes()
    assert columns.ops == single.ops
    assert both.ops == alone.ops


@pytest.mark.promise("P2")
def test_stores_apply_columns_in_order(tmp_path: Path) -> None:
    chance = random.Random(1)
    store, memory = open_store(tmp_path / "s"), MemoryStore()
    for _ in range(60):
        columns, single = mixed(chance)
        store.write(columns)
        memory.write(single)
        for family in (A, B):
            assert list(store.scan(family)) == list(memory.scan(family))
    store.close()


def test_operations_added_after_columns_stay_after_them() -> None:
    batch = Batch()
    batch.put_many(A, [b"k"], [b"v"])
    batch.ops.append((DELETE, A, b"k", b""))
    batch.put_many(A, [b"k"], [b"w"])
    assert batch.ops == [(PUT, A, b"k", b"v"), (DELETE, A, b"k", b""), (PUT, A, b"k", b"w")]
    batch.ops = []
    assert not batch


def test_a_column_with_a_value_that_is_not_bytes_is_refused_completely(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    batch = Batch()
    batch.put_many(A, [b"k", b"l"], [b"v", "text"])  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match="bytes only"):
        store.write(batch)
    assert list(store.scan(A)) == []
    store.close()
