"""Random values of AMQP 1.0."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from basaltmq.protocols.amqp10.wire import types as t

SYMBOLS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300).map(t.Symbol)
SCALARS: list[st.SearchStrategy[Any]] = [
    st.none(),
    st.booleans(),
    st.integers(0, 0xFF).map(t.Ubyte),
    st.integers(0, 0xFFFF).map(t.Ushort),
    st.integers(0, 0xFFFF_FFFF).map(t.Uint),
    st.integers(0, (1 << 64) - 1).map(t.Ulong),
    st.integers(-128, 127).map(t.Byte),
    st.integers(-(1 << 15), (1 << 15) - 1).map(t.Short),
    st.integers(-(1 << 31), (1 << 31) - 1).map(t.Int),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(width=32, allow_nan=False).map(t.Float),
    st.floats(allow_nan=False),
    st.characters(exclude_categories=["Cs"]).map(t.Char),
    st.integers(-(1 << 63), (1 << 63) - 1).map(t.Timestamp),
    st.uuids(),
    st.binary(max_size=300),
    st.text(max_size=300),
    SYMBOLS,
]
DECIMALS = [st.binary(min_size=size, max_size=size).map(t.Decimal) for size in (4, 8, 16)]
KEYS = st.one_of(SYMBOLS, st.text(max_size=20), st.integers(0, 0xFFFF_FFFF).map(t.Uint))
ARRAYS = st.one_of(
    st.lists(SYMBOLS, max_size=5).map(lambda each: t.Array(b"\xb3", each)),
    st.lists(st.integers(0, 0xFFFF_FFFF).map(t.Uint), max_size=5).map(lambda each: t.Array(b"\x70", each)),
    st.lists(st.booleans(), max_size=5).map(lambda each: t.Array(b"\x56", each)),
    st.lists(st.uuids(), max_size=5).map(lambda each: t.Array(b"\x98", each)),
)


def values(*scalars: st.SearchStrategy[Any], described: bool = True) -> st.SearchStrategy[Any]:
    """Values with lists, maps, arrays and descriptors around scalars."""

    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        found = [st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)]
        if described:
            described_values: Any = st.tuples(SYMBOLS, inner).map(lambda pair: t.Described(*pair))
            found.append(described_values)
        return st.one_of(found)

    return st.recursive(st.one_of(*scalars, ARRAYS), around, max_leaves=8)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and have the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, t.Described):
        return same(one.descriptor, other.descriptor) and same(one.value, other.value)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, float):
        return math.isclose(one, other) or one == other
    return bool(one == other)
