"""Tests every pair of key functions in `store/keys/`. Pairs are found by name, so new ones are tested too."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from basaltmq.errors import CorruptionError, InvalidArgumentError
from basaltmq.store.keys import broker, catalog, parts, queues, streams

HOSTILE = [
    "",
    "\x00",
    "\x00\x00",
    "a",
    "a\x00",
    "ab",
    "a:b",
    "a|b",
    ":",
    "|",
    "/",
    "ÿ",
    "\U0001f30b",
    "\uffff",
    "é" * 3,
]
TEXTS = st.sampled_from(HOSTILE) | st.text(max_size=6)
BINARIES = st.sampled_from([b"", b"\x00", b"\xff", b"\xff\xff", b"a:b", b"|"]) | st.binary(max_size=6)
U32 = st.sampled_from([0, 1, 255, 256, 2**32 - 1]) | st.integers(0, 2**32 - 1)
U64 = st.sampled_from([0, 1, 255, 256, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
I64 = st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1)

BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "message_id:bytes": st.binary(min_size=16, max_size=16),
    "record_id:bytes": st.binary(min_size=16, max_size=16),
    "body_id:bytes": st.binary(min_size=16, max_size=16),
    "kind:bytes": st.binary(min_size=1, max_size=1),
    "role:int": st.integers(0, 255),
    "lane:int": U32,
    "partition:int": U32,
    "format_id:int": I64,
    "time_ms:int": I64,
    "expire_at_ms:int": I64,
}
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "str": TEXTS,
    "bytes": BINARIES,
    "int": U64,
    "UUID": st.sampled_from([UUID(int=0), UUID(int=2**128 - 1)]) | st.uuids(),
}

keys: Any = SimpleNamespace(
    **{name: each for module in (parts, catalog, queues, streams, broker) for name, each in vars(module).items()}
)
"""All layouts in one namespace."""

ENCODERS = {name for name in vars(keys) if name.endswith("_key") and not name.startswith(("_", "decode_"))}
DECODERS = {name.removeprefix("decode_") for name in vars(keys) if name.startswith("decode_") and name.endswith("_key")}
PAIRS = sorted(ENCODERS & DECODERS)
PREFIXES = sorted(name for name in vars(keys) if name.endswith("_prefix") and not name.startswith("_"))


def function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(keys, name)
    return found


def parameters(name: str) -> dict[str, st.SearchStrategy[Any]]:
    chosen = {}
    for each in inspect.signature(function(name)).parameters.values():
        kind = str(each.annotation).removesuffix(" | None")
        chosen[each.name] = BY_NAME.get(f"{each.name}:{kind}", BY_TYPE[kind])
    return chosen


def numbers(name: str) -> list[str]:
    return [p.name for p in inspect.signature(function(name)).parameters.values() if p.annotation == "int"]


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_every_key_function_has_a_decoder_except_for_rows_that_are_only_looked_up() -> None:
    assert {"half_record_key", "link_delivery_key", "producers_key", "transient_counts_key"} == ENCODERS - DECODERS
    assert DECODERS <= ENCODERS


@pytest.mark.spec("A1", "C2")
@pytest.mark.parametrize("name", PAIRS)
def test_a_key_decodes_to_its_parts(name: str) -> None:
    strategies = parameters(name)

    @settings(max_examples=60)
    @given(st.fixed_dictionaries(strategies))
    def check(arguments: dict[str, Any]) -> None:
        key = function(name)(**arguments)
        assert as_tuple(function(f"decode_{name}")(key)) == tuple(arguments[each] for each in strategies)

    check()


@pytest.mark.spec("A1", "C2")
@pytest.mark.parametrize(("name", "number"), [(name, number) for name in PAIRS for number in numbers(name)])
def test_numbers_in_keys_sort_by_value(name: str, number: str) -> None:
    strategies = parameters(name)

    @settings(max_examples=60)
    @given(st.fixed_dictionaries(strategies), strategies[number])
    def check(arguments: dict[str, Any], other: int) -> None:
        left, right = function(name)(**arguments), function(name)(**{**arguments, number: other})
        assert (left < right) == (arguments[number] < other)
        assert (left == right) == (arguments[number] == other)

    check()


@pytest.mark.spec("C2")
@settings(max_examples=200)
@given(st.integers(0, 2**64 - 1), st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1), st.data())
def test_messages_of_a_fairness_key_sort_by_time_then_id(
    time_ns: int, message_id: bytes, other_ns: int, data: st.DataObject
) -> None:
    other_ns = data.draw(st.sampled_from([time_ns, other_ns]))
    other_id = data.draw(st.binary(min_size=16, max_size=16))
    left, right = keys.message_key("q", "f", time_ns, message_id), keys.message_key("q", "f", other_ns, other_id)
    assert (left < right) == ((time_ns, message_id) < (other_ns, other_id))


@pytest.mark.spec("C2")
@given(U64, U64, TEXTS, U64)
def test_the_lease_expiry_bound_separates_due_leases_from_later_ones(
    at_ns: int, now_ns: int, queue: str, token: int
) -> None:
    assert (keys.lease_expiry_key(at_ns, queue, token) < keys.lease_expiry_bound(now_ns)) == (at_ns < now_ns)


@given(I64, I64, U64, U64)
def test_the_record_expiry_bound_separates_due_records_from_later_ones(
    at_ms: int, now_ms: int, shard: int, offset: int
) -> None:
    assert (keys.stream_expiry_key(at_ms, shard, offset) < keys.stream_expiry_bound(now_ms)) == (at_ms < now_ms)


@pytest.mark.spec("A1", "C2")
@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_covers_exactly_its_own_keys(name: str) -> None:
    encode = name.removesuffix("_prefix") + "_key"
    fixed = parameters(name)
    optional = [
        each.name for each in inspect.signature(function(name)).parameters.values() if each.default is not each.empty
    ]

    @settings(max_examples=150)
    @given(st.fixed_dictionaries(parameters(encode)), st.fixed_dictionaries(fixed), st.data())
    def check(arguments: dict[str, Any], asked: dict[str, Any], data: st.DataObject) -> None:
        for each in fixed:
            if data.draw(st.booleans()):
                asked[each] = arguments[each]
        for each in optional:
            if data.draw(st.booleans()):
                asked.pop(each)
        prefix = function(name)(**asked)
        inside = all(arguments[each] == value for each, value in asked.items())
        key = function(encode)(**arguments)
        assert key.startswith(prefix) == inside
        start, end = keys.prefix_range(prefix)
        assert (start <= key and (end is None or key < end)) == inside

    check()


@pytest.mark.spec("C2")
@given(st.tuples(TEXTS, TEXTS), st.tuples(TEXTS, TEXTS), st.binary(min_size=16, max_size=16))
@example(("a", "b"), ("", "ab"), bytes(16))
@example(("a\x00", "b"), ("a", "\x00b"), bytes(16))
def test_different_names_have_different_keys(one: tuple[str, str], other: tuple[str, str], message_id: bytes) -> None:
    same = keys.message_key(*one, 1, message_id) == keys.message_key(*other, 1, message_id)
    assert same == (one == other)
    assert (keys.link_key(*one, 0) == keys.link_key(*other, 0)) == (one == other)


@pytest.mark.parametrize("name", PAIRS)
def test_a_damaged_key_raises_corruption_or_decodes_to_another_key(name: str) -> None:
    decode = function(f"decode_{name}")

    @settings(max_examples=80)
    @given(st.fixed_dictionaries(parameters(name)), st.data())
    def check(arguments: dict[str, Any], data: st.DataObject) -> None:
        key = function(name)(**arguments)
        cut = data.draw(st.integers(0, len(key)))
        damaged = data.draw(
            st.sampled_from([key[:cut], key[cut:], key[:cut] + b"\xff\xff" + key[cut:], key + b"\x00", key[:cut] + key])
            | st.binary(max_size=60)
        )
        try:
            decoded = as_tuple(decode(damaged))
        except CorruptionError as error:
            assert "no known layout" in str(error)  # noqa: PT017
            return
        assert function(name)(*decoded) == damaged

    check()


def test_the_error_for_a_long_damaged_key_is_short() -> None:
    with pytest.raises(CorruptionError) as caught:
        keys.decode_lease_key(b"\xff" * 100_000)
    assert len(str(caught.value)) < 200


NAMED: list[Callable[[str], bytes]] = [
    lambda text: keys.hierarchy_key(UUID(int=1), text),
    lambda text: keys.object_name_key(UUID(int=1), text, "n"),
    lambda text: keys.object_name_key(UUID(int=1), "k", text),
    lambda text: keys.link_key(text, "n", 0),
    lambda text: keys.link_key("c", text, 0),
    lambda text: keys.message_key(text, "f", 0, bytes(16)),
    lambda text: keys.message_key("q", text, 0, bytes(16)),
    lambda text: keys.lease_key(text, 1),
    lambda text: keys.lease_expiry_key(0, text, 1),
    lambda text: keys.queue_key(text),
    lambda text: keys.state_key(text),
    lambda text: keys.consumer_offset_key(text, UUID(int=1), 0),
    lambda text: keys.topic_group_key(UUID(int=1), text),
]


@pytest.mark.promise("P8")
@pytest.mark.parametrize("encode", NAMED)
def test_names_of_64_kib_fit_and_longer_ones_are_refused(encode: Callable[[str], bytes]) -> None:
    longest = "\U0001f30b" * (keys.STRING_BYTES_MAX // 4) + "abc"
    assert longest.encode() in encode(longest)
    with pytest.raises(InvalidArgumentError, match="65536 bytes is too long: at most 65535"):
        encode(longest + "d")


@pytest.mark.parametrize("encode", NAMED)
def test_half_a_surrogate_pair_is_refused_with_its_position(encode: Callable[[str], bytes]) -> None:
    with pytest.raises(InvalidArgumentError, match="not Unicode text: character 2"):
        encode("ab\ud83c")


@pytest.mark.spec("A6")
def test_transaction_ids_from_clients_are_checked() -> None:
    for format_id in (2**63, -(2**63) - 1):
        with pytest.raises(InvalidArgumentError, match="does not fit 64 bits"):
            keys.xid_key(format_id, b"g", b"b")
    with pytest.raises(InvalidArgumentError, match="too long"):
        keys.xid_key(1, bytes(65536), b"b")


@pytest.mark.parametrize(
    "encode",
    [
        lambda: keys.lease_expiry_key(-1, "q", 1),
        lambda: keys.lease_expiry_key(2**64, "q", 1),
        lambda: keys.message_key("q", "f", 2**64, bytes(16)),
        lambda: keys.message_key("q", "f", 1, bytes(15)),
        lambda: keys.message_key("q", "f", 1, bytes(17)),
        lambda: keys.lease_key("q", -1),
        lambda: keys.consumer_offset_key("g", UUID(int=1), 2**32),
    ],
)
def test_an_internal_number_or_id_that_does_not_fit_fails_an_assertion(encode: Callable[[], bytes]) -> None:
    with pytest.raises((struct.error, AssertionError)):
        encode()


@given(st.binary(max_size=5).map(lambda raw: bytes(b"\x00a\xfe\xff"[b % 4] for b in raw)), st.binary(max_size=6))
def test_prefix_range_covers_exactly_the_keys_with_the_prefix(prefix: bytes, key: bytes) -> None:
    start, end = keys.prefix_range(prefix)
    for each in (key, prefix + key, prefix):
        assert (start <= each and (end is None or each < end)) == each.startswith(prefix)
