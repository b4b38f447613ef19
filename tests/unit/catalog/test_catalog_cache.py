"""The cache is bounded and never stale."""

from __future__ import annotations

import random
from uuid import UUID

import pytest
from tests.unit.catalog.stores import CountingStore

from basaltmq.catalog.cache import ENTRY_BYTES, Cache
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import NewObject
from basaltmq.store.families import Family


@pytest.mark.promise("P8")
def test_the_least_recently_used_entry_is_evicted_at_the_limit() -> None:
    cache: Cache[int] = Cache(10 * (ENTRY_BYTES + 101))
    for number in range(10):
        cache.put(bytes((number,)), number, 100, cache.epoch)
    assert len(cache) == 10
    assert cache.get(b"\0") is not None
    cache.put(b"x", 99, 100, cache.epoch)
    assert len(cache) == 10
    assert cache.get(b"\0") is not None
    assert cache.get(b"\1") is None
    cache.put(b"huge", 1, 10_000_000, cache.epoch)
    assert cache.get(b"huge") is None
    chance = random.Random(1)
    for _ in range(500):
        cache.put(chance.randbytes(2), 0, chance.randrange(2000), cache.epoch)
        assert cache.size_bytes <= 10 * (ENTRY_BYTES + 101)
    cache.clear()
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_a_value_read_before_a_change_is_not_cached_after_it() -> None:
    cache: Cache[str] = Cache(1 << 20)
    epoch = cache.epoch
    cache.discard(b"key")
    cache.put(b"key", "stale", 5, epoch)
    assert cache.get(b"key") is None


def test_a_missing_object_is_cached_until_it_is_created(counting: CountingStore) -> None:
    catalog = Catalog(counting)
    catalog.open()
    assert catalog.find(Kind.TOPIC, "q") is None
    reads = counting.reads
    assert catalog.find(Kind.TOPIC, "q") is None
    assert counting.reads == reads
    made = catalog.create(Kind.TOPIC, "q")
    assert catalog.find(Kind.TOPIC, "q") == made
    catalog.find(Kind.TOPIC, "q")
    reads = counting.reads
    assert catalog.find(Kind.TOPIC, "q") == catalog.get(made.id) == made
    assert counting.reads == reads


def test_a_reader_that_races_with_a_change_does_not_cache_its_result(counting: CountingStore) -> None:
    catalog = Catalog(counting)
    catalog.open()
    made = catalog.create(Kind.TOPIC, "q")
    plain_get = counting.get

    def get_then_change(family: Family, key: bytes) -> bytes | None:
        value = plain_get(family, key)
        if family is Family.OBJECT_NAMES:
            counting.get = plain_get  # type: ignore[method-assign]
            catalog.delete(made.id)
        return value

    counting.get = get_then_change  # type: ignore[method-assign]
    catalog.find(Kind.TOPIC, "q")
    assert catalog.find(Kind.TOPIC, "q") is None
    assert catalog.get(made.id) is None


@pytest.mark.promise("P8")
def test_the_memory_of_the_cache_is_bounded_for_any_lookups(counting: CountingStore) -> None:
    catalog = Catalog(counting, cache_bytes=64 << 10)
    catalog.open()
    catalog.create_many([NewObject(Kind.TOPIC, f"t{number}", attributes={"x": "y" * 100}) for number in range(1000)])
    for number in range(2000):
        catalog.find(Kind.TOPIC, f"t{number}")
        catalog.get(UUID(int=number + 1))
    assert catalog._objects.size_bytes + catalog._names.size_bytes <= 64 << 10
    assert len(catalog._objects) > 10
    assert len(catalog._names) > 10
