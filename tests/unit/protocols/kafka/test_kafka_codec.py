"""Codecs of requests and responses: complete, truncated, and random input."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basaltmq.errors import MalformedRequestError
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire.schema import Array, Field, Struct, encode_array, read_varint
from basaltmq.varints import varint

VERSIONS = [(api, version) for api in k.APIS.values() for version in range(api.version_min, api.version_max + 1)]
HOSTILE = (0x7FFFFFFF, -1, -2, -(1 << 31), 1 << 20)


def value_of(kind: str | Array | Struct, version: int) -> st.SearchStrategy[Any]:
    if isinstance(kind, Array):
        return st.lists(value_of(kind.of, version), max_size=2)
    if isinstance(kind, Struct):
        return body_of(kind, version)
    bits = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}.get(kind)
    if bits is not None:
        return st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    known: dict[str, st.SearchStrategy[Any]] = {
        "bool": st.booleans(),
        "uint16": st.integers(0, (1 << 16) - 1),
        "string": st.text(max_size=5),
        "bytes": st.binary(max_size=5),
        "records": st.binary(max_size=5),
        "uuid": st.uuids(),
    }
    return known[kind]


def body_of(table: Struct, version: int) -> st.SearchStrategy[dict[str, Any]]:
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in table.fields:
        if field.is_in(version) and field.tag < 0:
            inner = value_of(field.type, version)
            fields[field.name] = st.none() | inner if version >= field.null_since else inner
        else:
            fields[field.name] = st.just(field.zero)
    return st.fixed_dictionaries(fields)


def listed(value: Any) -> Any:
    """Convert to lists, because empty defaults are tuples and decoded values are lists."""
    if isinstance(value, dict):
        return {name: listed(each) for name, each in value.items()}
    return [listed(each) for each in value] if isinstance(value, (list, tuple)) else value


@settings(max_examples=300)
@given(st.data())
def test_messages_round_trip(data: st.DataObject) -> None:
    api, version = data.draw(st.sampled_from(VERSIONS))
    asked = data.draw(body_of(api.request, version))
    client = data.draw(st.none() | st.text(max_size=8))
    raw = k.encode_request(api.key, version, 77, client, asked)
    request = k.decode_request(raw[4:])
    assert int.from_bytes(raw[:4], "big") == len(raw) - 4
    assert (request.api, request.version, request.correlation_id, request.client_id) == (api, version, 77, client)
    assert listed(request.body) == listed(asked)

    responded = data.draw(body_of(api.response, version))
    raw = b"".join(k.encode_response(api, version, 9, responded))
    correlation_id, found = k.decode_response(api.key, version, raw[4:])
    assert correlation_id == 9
    assert listed(found) == listed(responded)


@pytest.mark.parametrize("version", range(k.APIS[k.METADATA].version_max + 1))
def test_pre_encoded_arrays_are_written_like_their_elements(version: int) -> None:
    api = k.APIS[k.METADATA]
    plain = [{"partition_index": at, "leader_id": 1, "isr_nodes": (1, 2)} for at in range(200)]
    encoded = encode_array(k.METADATA_PARTITION, plain, version, version >= api.flexible_since)
    raw = [
        k.encode_response(api, version, 1, {"topics": [{"name": "t", "partitions": given}] * 2})
        for given in (plain, encoded)
    ]
    assert raw[0] == raw[1]


def test_only_large_values_of_a_response_are_separate_buffers() -> None:
    topics = [{"name": f"t{at}", "partitions": [{"partition_index": 0}] * 8} for at in range(150)]
    (raw,) = k.encode_response(k.APIS[k.METADATA], 9, 1, {"topics": topics})
    assert len(raw) > k.JOINED_BYTES_MAX
    assert len(k.decode_response(k.METADATA, 9, raw[4:])[1]["topics"]) == 150

    batches = [bytes(100), bytes(k.JOINED_BYTES_MAX + 1), bytes(100), bytes(100)]
    partitions = [{"partition": at, "records": batches} for at in range(2)]
    pieces = k.encode_response(k.APIS[k.FETCH], 12, 1, {"topics": [{"topic": "t", "partitions": partitions}]})
    assert [piece is batches[1] for piece in pieces] == [False, True, False, True, False]
    found = k.decode_response(k.FETCH, 12, b"".join(pieces)[4:])[1]
    assert [each["records"] for each in found["topics"][0]["partitions"]] == [b"".join(batches)] * 2


@pytest.mark.promise("P13")
def test_a_response_of_many_pieces_is_joined_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [bytes(100), b"x" * (k.JOINED_BYTES_MAX + 1), bytes(100)]
    partitions = [{"partition": at, "records": batches} for at in range(40)]
    body = {"topics": [{"topic": "t", "partitions": partitions}]}
    whole = k.encode_response(k.APIS[k.FETCH], 12, 1, body)
    for portion in (1, 7, 50):
        monkeypatch.setattr(k, "PIECES_AT_ONCE", portion)
        pieces = k.encode_response(k.APIS[k.FETCH], 12, 1, body)
        assert b"".join(pieces) == b"".join(whole)
        assert sum(piece is batches[1] for piece in pieces) == 40, "large values are not copied"
    described = {
        "results": [{"resource_name": "t", "configs": [{"name": f"c{at}", "value": "v"} for at in range(500)]}]
    }
    assert len(k.encode_response(k.APIS[k.DESCRIBE_CONFIGS], 1, 1, described)) > 500 // 50


@settings(max_examples=300)
@given(st.data())
def test_a_truncated_request_is_malformed(data: st.DataObject) -> None:
    api, version = data.draw(st.sampled_from(VERSIONS))
    raw = k.encode_request(api.key, version, 1, "c", data.draw(body_of(api.request, version)))[4:]
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(MalformedRequestError):
        k.decode_request(raw[:cut])


@settings(max_examples=500)
@given(st.data())
def test_random_bytes_are_a_request_or_malformed(data: st.DataObject) -> None:
    api, version = data.draw(st.sampled_from(VERSIONS))
    head = api.key.to_bytes(2, "big") + version.to_bytes(2, "big") + b"\0\0\0\1\xff\xff"
    try:
        k.decode_request(head + data.draw(st.binary(max_size=60)))
    except MalformedRequestError:
        return


@settings(max_examples=500)
@given(st.data())
def test_a_request_with_a_hostile_length_is_decoded_or_malformed(data: st.DataObject) -> None:
    api, version = data.draw(st.sampled_from(VERSIONS))
    raw = bytearray(k.encode_request(api.key, version, 1, "c", data.draw(body_of(api.request, version)))[4:])
    at = data.draw(st.integers(8, max(8, len(raw) - 4)))
    hostile = data.draw(st.sampled_from(HOSTILE))
    width = data.draw(st.sampled_from((2, 4)))
    raw[at : at + width] = (hostile & ((1 << 8 * width) - 1)).to_bytes(width, "big")
    try:
        k.decode_request(bytes(raw))
    except MalformedRequestError:
        return


@pytest.mark.parametrize("count", [0x7FFFFFFF, -2, 1000])
def test_an_impossible_count_is_refused_before_allocation(count: int) -> None:
    table = Struct(Field("names", Array("string"))).codec(0, False)
    with pytest.raises(MalformedRequestError, match="names"):
        table.read(count.to_bytes(4, "big", signed=True) + b"\0\0" * 4, 0)


def test_null_in_a_field_that_is_not_nullable_is_malformed() -> None:
    for kind, raw in (("string", b"\xff\xff"), ("bytes", b"\xff" * 4)):
        with pytest.raises(MalformedRequestError):
            Struct(Field("it", kind)).codec(0, False).read(raw, 0)
        assert Struct(Field("it", kind, null_since=0)).codec(0, False).read(raw, 0) == ({"it": None}, len(raw))


def test_unknown_tags_are_skipped_and_known_ones_read() -> None:
    table = Struct(Field("a", "int8"), Field("t", "string", tag=3)).codec(0, True)
    raw = b"\x05\x02" + b"\x03\x03\x03hi" + b"\x09\x02zz"
    assert table.read(raw, 0) == ({"a": 5, "t": "hi"}, len(raw))
    out: list[bytes] = []
    table.write({"a": 5, "t": "hi"}, out)
    assert table.read(b"".join(out), 0)[0] == {"a": 5, "t": "hi"}
    with pytest.raises(MalformedRequestError):
        table.read(b"\x05\x01\x03\x04\x03hi\x00", 0)


@given(st.integers(0, (1 << 32) - 1))
def test_varints_round_trip(number: int) -> None:
    raw = varint(number)
    assert read_varint(raw, 0) == (number, len(raw))


def test_an_unterminated_varint_is_malformed() -> None:
    for raw in (b"", b"\xff", b"\xff" * 9):
        with pytest.raises(MalformedRequestError):
            read_varint(raw, 0)


def test_unknown_requests_and_unknown_versions_get_different_errors() -> None:
    with pytest.raises(k.UnsupportedVersionError):
        k.decode_request(b"\x00\x12\x00\x63\0\0\0\1\xff\xff")
    with pytest.raises(MalformedRequestError, match="API key 99"):
        k.decode_request(b"\x00\x63\x00\x00\0\0\0\1\xff\xff")


def test_chunks_of_records_are_written_without_joining() -> None:
    out: list[bytes] = []
    chunks = [b"a" * 10, b"b" * 20]
    Struct(Field("records", "records")).codec(0, True).write({"records": chunks}, out)
    assert out[1] is chunks[0]
    assert out[2] is chunks[1]
    assert out[0] == varint(31)


def test_uuids_have_16_bytes() -> None:
    table = Struct(Field("id", "uuid")).codec(0, False)
    assert table.read(bytes(range(16)), 0) == ({"id": UUID(bytes=bytes(range(16)))}, 16)
    with pytest.raises(MalformedRequestError):
        table.read(bytes(15), 0)
