"""Field tables: round trips of every kind, edits of single fields, and malicious input."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.message import amqp_table
from basaltmq.broker.message.amqp_table import DEPTH_MAX, Long, Table, Timestamp, Value
from basaltmq.errors import MalformedTableError

NAMES = st.text(max_size=20)
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
SCALARS: st.SearchStrategy[Value] = st.one_of(
    st.booleans(),
    INTEGERS,
    INTEGERS.map(Long),
    st.integers(0, (1 << 64) - 1).map(Timestamp),
    st.floats(allow_nan=False),
    st.text(max_size=30),
    st.binary(max_size=30),
    st.none(),
    st.builds(
        lambda digits, scale: Decimal(digits).scaleb(-scale), st.integers(-(1 << 31), (1 << 31) - 1), st.integers(0, 9)
    ),
)
VALUES: st.SearchStrategy[Value] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)
TABLES: st.SearchStrategy[Table] = st.dictionaries(NAMES, VALUES, max_size=6)


def table_of(*fields: bytes) -> bytes:
    body = b"".join(fields)
    return len(body).to_bytes(4, "big") + body


@given(TABLES)
def test_tables_round_trip(table: Table) -> None:
    raw = amqp_table.encode(table)
    assert amqp_table.decode_all(raw) == table
    assert amqp_table.check(raw, 0, len(raw)) == len(raw)
    for name, value in table.items():
        assert amqp_table.find(raw, name) == value


@given(TABLES, TABLES)
def test_an_edit_keeps_other_fields_byte_for_byte(table: Table, put: Table) -> None:
    edited = amqp_table.edit(amqp_table.encode(table), put, drop=("dropped",))
    kept = {name: value for name, value in table.items() if name not in put and name != "dropped"}
    assert edited == amqp_table.encode(kept | put)


def test_an_edit_keeps_the_width_of_numbers_it_does_not_touch() -> None:
    raw = table_of(b"\1ab\x05", b"\1bu\0\7", b"\1cf\x3f\x80\0\0", b"\1dL\0\0\0\0\0\0\0\1")
    assert amqp_table.edit(raw, {"z": True}) == table_of(raw[4:], b"\1zt\1")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"t\0", False),
        (b"t\x07", True),
        (b"b\xff", -1),
        (b"B\xff", 255),
        (b"s\xff\xfe", -2),
        (b"u\xff\xfe", 65534),
        (b"I\xff\xff\xff\xff", -1),
        (b"i\xff\xff\xff\xff", (1 << 32) - 1),
        (b"l\xff\xff\xff\xff\xff\xff\xff\xff", -1),
        (b"L\0\0\0\0\0\0\0\2", 2),
        (b"f\x3f\x80\0\0", 1.0),
        (b"d\x3f\xf0\0\0\0\0\0\0", 1.0),
        (b"D\x02\0\0\x01\x3a", Decimal("3.14")),
        (b"S\0\0\0\2hi", "hi"),
        (b"S\0\0\0\2\xff\xfe", b"\xff\xfe"),
        (b"x\0\0\0\2hi", b"hi"),
        (b"T\0\0\0\0\0\0\0\5", Timestamp(5)),
        (b"V", None),
        (b"A\0\0\0\3t\1V", [True, None]),
        (b"F\0\0\0\3\1aV", {"a": None}),
    ],
)
def test_every_field_type_of_clients_is_decoded(field: bytes, value: Value) -> None:
    raw = table_of(b"\3key" + field)
    assert amqp_table.decode_all(raw) == {"key": value}
    assert type(amqp_table.decode_all(raw)["key"]) is type(value)
    assert amqp_table.check(raw, 0, len(raw)) == len(raw)


def test_not_a_number_round_trips() -> None:
    found = amqp_table.decode_all(amqp_table.encode({"n": math.nan}))["n"]
    assert isinstance(found, float)
    assert math.isnan(found)


def test_the_first_of_duplicate_fields_is_used() -> None:
    assert amqp_table.decode_all(table_of(b"\1aB\1", b"\1aB\2")) == {"a": 1}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "breaks off within its size"),
        (b"\0\0\0", "breaks off within its size"),
        (b"\0\0\0\5", "exceeds the"),
        (b"\xff\xff\xff\xff", "exceeds the"),
        (b"\0\0\0\1\0", "field's name"),
        (b"\0\0\0\2\x05a", "field's name"),
        (table_of(b"\1ab"), "breaks off"),
        (table_of(b"\1al\0\0"), "breaks off"),
        (table_of(b"\1aT\0\0"), "breaks off"),
        (table_of(b"\1aD\0\0"), "breaks off"),
        (table_of(b"\1aS\0\0\0\x09hi"), "exceeds the"),
        (table_of(b"\1aA\0\0\0\x09V"), "exceeds the"),
        (table_of(b"\1aF\0\0\0\x02\1a"), "field's name"),
        (table_of(b"\1aA\0\0\0\1l"), "breaks off"),
        (table_of(b"\1aq"), "kind 'q'"),
        (table_of(b"\1\xffV"), "not UTF-8"),
    ],
)
def test_a_damaged_table_is_refused_by_every_reader(raw: bytes, said: str) -> None:
    with pytest.raises(MalformedTableError, match=said):
        amqp_table.decode_all(raw)
    with pytest.raises(MalformedTableError, match=said):
        amqp_table.check(raw, 0, len(raw))


@given(st.binary(max_size=60))
def test_all_readers_decode_or_refuse_random_bytes_alike(raw: bytes) -> None:
    def outcome(read: object) -> bool:
        try:
            read()  # type: ignore[operator]
        except MalformedTableError:
            return False
        return True

    decoded = outcome(lambda: amqp_table.decode(raw))
    assert decoded == outcome(lambda: amqp_table.check(raw, 0, len(raw)))


@pytest.mark.parametrize("kind", ["table", "array"])
def test_nesting_above_the_limit_is_refused(kind: str) -> None:
    def nested(levels: int) -> Table:
        value: Value = 1
        for _ in range(levels - 1):
            value = {"a": value} if kind == "table" else [value]
        return {"top": value}

    raw = amqp_table.encode(nested(DEPTH_MAX))
    assert amqp_table.decode_all(raw) == nested(DEPTH_MAX)
    with pytest.raises(MalformedTableError, match="nested deeper than 32"):
        amqp_table.encode(nested(DEPTH_MAX + 1))
    inner = raw[4:]
    deeper = table_of(b"\1zF" + table_of(inner))
    with pytest.raises(MalformedTableError, match="nested deeper"):
        amqp_table.decode_all(deeper)
    with pytest.raises(MalformedTableError, match="nested deeper"):
        amqp_table.check(deeper, 0, len(deeper))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1 << 63, "64 bits"),
        (Timestamp(-1), "before 1970"),
        (Decimal("NaN"), "not a number"),
        (Decimal(1 << 31), "32 bits"),
        (Decimal(1).scaleb(-256), "places"),
        ("\ud800", "UTF-8"),
        (object(), "cannot contain a value of type object"),
    ],
)
def test_values_without_an_encoding_are_refused_by_name(value: Value, said: str) -> None:
    with pytest.raises(MalformedTableError, match=said):
        amqp_table.encode({"a": value})


def test_a_name_over_the_limit_is_refused() -> None:
    assert amqp_table.decode_all(amqp_table.encode({"n" * 255: None})) == {"n" * 255: None}
    with pytest.raises(MalformedTableError, match="256 bytes is over the limit of 255"):
        amqp_table.encode({"n" * 256: None})
