"""The type system of AMQP 1.0: every value survives, Qpid Proton reads and writes the same, damage is a fault."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proton import Data, Described, symbol
from tests.unit.protocols.amqp10.values import DECIMALS, SCALARS, SYMBOLS, same, values

from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import Fault


@pytest.mark.spec("G2")
@settings(max_examples=60)
@given(values(*SCALARS, *DECIMALS))
def test_a_value_is_decoded_with_its_type(value: Any) -> None:
    assert same(t.decode_all(t.encode(value)), value)


@pytest.mark.spec("G2")
@settings(max_examples=40)
@given(values(*SCALARS, described=False))
def test_proton_reads_what_we_write_and_writes_the_same_value(value: Any) -> None:
    # Proton loses values after nested described ones, so there are none.
    data = Data()
    raw = t.encode(value)
    while raw:
        raw = raw[data.decode(raw) :]
    again = data.encode()
    assert same(t.decode_all(bytes(again)), value)


@given(st.dictionaries(SYMBOLS, st.one_of(st.integers(0, 9), st.text(max_size=9), st.booleans()), max_size=5))
def test_we_read_what_proton_writes(table: dict[str, Any]) -> None:
    data = Data()
    data.put_object(Described(symbol("a:b"), {symbol(name): value for name, value in table.items()}))
    found = t.decode_all(bytes(data.encode()))
    assert found == t.Described(t.Symbol("a:b"), table)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_fault(raw: bytes) -> None:
    try:
        value, at = t.decode(raw, 0, len(raw))
    except Fault:
        return
    assert at <= len(raw)
    assert same(t.decode_all(t.encode(value)), value) or value != value or "nan" in repr(value)


@settings(max_examples=40)
@given(values(*SCALARS), st.data())
def test_a_cut_value_is_a_fault(value: Any, data: st.DataObject) -> None:
    raw = t.encode(value)
    with pytest.raises(Fault):
        t.decode_all(raw[: data.draw(st.integers(0, len(raw) - 1))])


def test_deep_nesting_and_large_counts_are_faults() -> None:
    deep = b"\x45"
    for _ in range(t.DEPTH_MAX + 1):
        deep = t.encode_compound(0xC0, 1, deep)
    with pytest.raises(Fault, match="nested deeper"):
        t.decode_all(deep)
    with pytest.raises(Fault, match="nested deeper"):
        t.decode_all(b"\0" * 100_000)
    many_nulls = b"\xf0\0\0\0\x05\xff\xff\xff\xff\x40"
    with pytest.raises(Fault, match="array of 4294967295"):
        t.decode_all(many_nulls)
    with pytest.raises(Fault, match="only"):
        t.decode_all(b"\xd0\0\0\0\x05\xff\xff\xff\xff\x40")


def test_a_map_whose_keys_are_lists_is_kept() -> None:
    value = t.Pairs([([1], "a"), ({t.Symbol("b"): 2}, None)])
    assert same(list(t.decode_all(t.encode(value))), list(value))
