"""The link store: durable AMQP 1.0 links, their layout and their version."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.catalog.stores import CountingStore, rows

from basaltmq.catalog.faults import FaultKind
from basaltmq.catalog.links import TERMINUS_BYTES_MAX, Link, LinkStore, Role, decode_link, encode_link
from basaltmq.errors import (
    CorruptionError,
    InvalidArgumentError,
    LimitExceededError,
    StorageError,
    StoreClosedError,
)
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.memory import MemoryStore

LINK = Link("client", "events", Role.SENDER, b"\x00\x53\x28", b"\x40")


def opened(store: Store) -> tuple[LinkStore, list[Link]]:
    found: list[Link] = []
    links = LinkStore(store)
    assert links.open_and_load(found.append).visited == len(found)
    return links, found


@pytest.mark.spec("A8")
def test_links_are_identified_by_container_name_and_role(store: Store) -> None:
    links, found = opened(store)
    assert found == []
    saved = [
        LINK,
        msgspec.structs.replace(LINK, role=Role.RECEIVER),
        msgspec.structs.replace(LINK, name=""),
        Link("client" + "events", "", Role.SENDER, b"", b""),
        Link("", "clientevents", Role.SENDER, b"", b"x" * 100_000),
        Link("a\0b|c", "ünï🜁", Role.RECEIVER, bytes(range(256)), b"\xff"),
    ]
    for link in saved:
        links.save_link(link)
    links.close()
    assert sorted(opened(store)[1], key=repr) == sorted(saved, key=repr)


@pytest.mark.spec("A8")
def test_rows_have_the_documented_layout(store: Store) -> None:
    links, _ = opened(store)
    links.save_link(Link("c", "name", Role.RECEIVER, b"src", b"tt"))
    assert rows(store, Family.AMQP_1_0_LINKS) == {("amqp_1_0_links", b"\0\1c\0\4name\1"): b"\2\0\0\0\3src\0\0\0\2tt"}
    assert store.get(Family.VERSION, b"amqp_1_0_links_version") == b"\0\0\0\2"


@pytest.mark.spec("A8")
def test_save_replaces_and_delete_removes_only_the_given_link(store: Store) -> None:
    links, _ = opened(store)
    other = msgspec.structs.replace(LINK, role=Role.RECEIVER)
    changed = msgspec.structs.replace(LINK, source=b"changed")
    links.save_link(LINK)
    links.save_link(other)
    links.save_link(changed)
    links.delete_link(other)
    links.delete_link(other)
    links.close()
    assert opened(store)[1] == [changed]


@pytest.mark.spec("A8")
@pytest.mark.promise("P1")
def test_each_change_is_synced(counting: CountingStore) -> None:
    links, _ = opened(counting)
    syncs = counting.syncs
    links.save_link(LINK)
    links.delete_link(LINK)
    assert counting.syncs == syncs + 2


@pytest.mark.spec("A8")
def test_a_second_open_fails_and_close_is_idempotent(store: Store) -> None:
    links, _ = opened(store)
    links.save_link(LINK)
    with pytest.raises(StorageError, match="link store is already open"):
        links.open_and_load(lambda link: None)
    links.close()
    links.close()
    for change in (links.save_link, links.delete_link):
        with pytest.raises(StoreClosedError, match="link store is not open"):
            change(LINK)
    assert opened(store)[1] == [LINK]


@pytest.mark.spec("A8")
@pytest.mark.promise("P10")
def test_delete_leaves_no_row(store: Store) -> None:
    links, _ = opened(store)
    links.save_link(LINK)
    links.save_link(Link("x" * 0xFFFF, "\U0010ffff" * 5, Role.RECEIVER, b"", b""))
    links.delete()
    assert rows(store) == {}
    assert opened(store)[1] == []


@pytest.mark.spec("A8")
@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("remote_container", None, InvalidArgumentError),
        ("remote_container", "x" * 0x10000, InvalidArgumentError),
        ("name", b"bytes", InvalidArgumentError),
        ("name", "\ud800", InvalidArgumentError),
        ("role", 2, InvalidArgumentError),
        ("role", "sender", InvalidArgumentError),
        ("source", None, InvalidArgumentError),
        ("target", "text", InvalidArgumentError),
        ("target", b"x" * (TERMINUS_BYTES_MAX + 1), LimitExceededError),
    ],
)
def test_invalid_links_are_refused(field: str, value: Any, error: type[Exception]) -> None:
    store = MemoryStore()
    links, _ = opened(store)
    before = rows(store)
    with pytest.raises(error):
        links.save_link(msgspec.structs.replace(LINK, **{field: value}))
    assert rows(store) == before


@pytest.mark.spec("A8")
@given(source=st.binary(max_size=300), target=st.binary(max_size=300), cut=st.integers(0, 700), extra=st.binary())
def test_a_row_survives_a_round_trip_and_other_lengths_are_refused(
    source: bytes, target: bytes, cut: int, extra: bytes
) -> None:
    link = Link("c", "n", Role.SENDER, source, target)
    key = catalog_keys.link_key("c", "n", 0)
    raw = encode_link(link)
    assert decode_link(key, raw) == link
    for damaged in {raw[:cut], raw + extra} - {raw}:
        with pytest.raises(CorruptionError, match="'n' of container 'c'"):
            decode_link(key, damaged)


@pytest.mark.spec("A8")
@pytest.mark.promise("P7")
def test_a_damaged_row_is_reported_by_name_and_not_changed(store: Store) -> None:
    links, _ = opened(store)
    links.save_link(LINK)
    links.close()
    batch = Batch()
    batch.put(Family.AMQP_1_0_LINKS, catalog_keys.link_key("c", "cut", 0), b"\2\0\0\0\x09x")
    batch.put(Family.AMQP_1_0_LINKS, catalog_keys.link_key("c", "old", 0), b"\1\0\0\0\0")
    batch.put(Family.AMQP_1_0_LINKS, catalog_keys.link_key("c", "role", 9), encode_link(LINK))
    batch.put(Family.AMQP_1_0_LINKS, catalog_keys.link_key("c", "empty", 0), b"")
    batch.put(Family.AMQP_1_0_LINKS, b"\xff", b"")
    store.write(batch)
    before = rows(store)
    found: list[Link] = []
    report = links.open_and_load(found.append)
    assert found == [LINK]
    assert [fault.kind for fault in report.faults] == [FaultKind.DAMAGED_ROW] * 5
    texts = " ".join(fault.text for fault in report.faults)
    assert all(name in texts for name in ("'cut'", "'old'", "'role'", "'empty'"))
    assert rows(store) == before


@pytest.mark.spec("A8")
def test_a_handler_stops_the_load(store: Store) -> None:
    links, _ = opened(store)
    for role in Role:
        links.save_link(msgspec.structs.replace(LINK, role=role))
    links.close()
    assert links.open_and_load(lambda link: False).visited == 1
