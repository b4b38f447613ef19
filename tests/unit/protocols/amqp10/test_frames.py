"""Frames and performatives: in pieces of any size, with every field, and with fields that are wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basaltmq.protocols.amqp10.wire import frames as f
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import Fault

PERFORMATIVES = [
    p.Open(container_id="a", max_frame_size=512, channel_max=7, offered_capabilities=["x", "y"], properties={}),
    p.Begin(remote_channel=3, next_outgoing_id=1, incoming_window=2, outgoing_window=3, handle_max=255),
    p.Attach(
        name="link",
        handle=300,
        role=p.RECEIVER,
        source=p.Source(
            address="/queues/a",
            durable=2,
            expiry_policy="never",
            filter={t.Symbol("f"): t.Described(t.Symbol("f"), "x")},
            default_outcome=p.Modified(delivery_failed=True),
            outcomes=["amqp:accepted:list"],
        ),
        target=p.Target(address="b", dynamic=True),
        unsettled={b"tag": p.Accepted()},
        initial_delivery_count=0,
    ),
    p.Flow(next_incoming_id=0, incoming_window=5, handle=0, delivery_count=1, link_credit=100, drain=True),
    p.Transfer(handle=1, delivery_id=2, delivery_tag=b"t", state=p.TransactionalState(txn_id=b"x")),
    p.Disposition(role=True, first=1, last=5, settled=True, state=p.Rejected(error=p.error_of("a:b", "why"))),
    p.Detach(handle=1, closed=True),
    p.Close(error=p.error_of("amqp:not-found", "gone")),
]


@pytest.mark.spec("G2")
@settings(max_examples=40)
@given(st.data())
def test_frames_arrive_in_pieces(data: st.DataObject) -> None:
    sent = [f.frame(number, p.encode(each)) for number, each in enumerate(PERFORMATIVES)]
    stream = f.AMQP_HEADER + b"".join(sent)
    reader = f.FrameReader(4096)
    found = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += [(each.kind, each.channel, each.raw[each.at : each.end]) for each in reader.feed(stream[:size])]
        stream = stream[size:]
    assert found[0] == (f.HEADER, 0, f.AMQP_HEADER)
    assert [body for _, _, body in found[1:]] == [p.encode(each) for each in PERFORMATIVES]
    assert [channel for _, channel, _ in found[1:]] == list(range(len(PERFORMATIVES)))


@pytest.mark.parametrize("performative", PERFORMATIVES, ids=lambda each: type(each).__name__)
def test_a_performative_is_decoded_with_every_field(performative: p.Composite) -> None:
    raw = p.encode(performative)
    found, end = p.decode(raw, 0, len(raw))
    if isinstance(performative, p.Attach):
        assert isinstance(found, p.Attach)
        assert found.unsettled is not None
        found.unsettled = {key: p.of_described(value) for key, value in found.unsettled.items()}
    assert (found, end) == (performative, len(raw))


def test_quick_fields_are_those_of_the_performative() -> None:
    for each in PERFORMATIVES:
        if isinstance(each, p.Flow | p.Transfer | p.Disposition):
            raw = p.encode(each)
            fields, end = f.read_fields(raw, 3, len(raw))
            assert end == len(raw)
            for name, value in zip(each.__struct_fields__, fields, strict=False):
                expected = getattr(each, name)
                assert value == expected or isinstance(value, t.Described)


def test_our_transfers_and_dispositions_are_read_back() -> None:
    out: list[bytes] = []
    f.encode_transfer(out, 7, 70_000, 0xFFFF_FFFF, b"x" * 16, 3, 3)
    (found,) = _frames(out[0] + b"abc")
    fields, at = f.read_fields(found.raw, found.at + 3, found.end)
    assert fields[:6] == [70_000, 0xFFFF_FFFF, b"x" * 16, 0, True, True]
    assert found.raw[at : found.end] == b"abc"
    assert len(out[0]) == f.transfer_bytes(b"x" * 16)
    raw = f.encode_disposition(1, is_receiver=True, first=1, last=300, is_settled=True, state=f.ACCEPTED)
    (found,) = _frames(raw)
    assert p.decode(found.raw, found.at, found.end)[0] == p.Disposition(
        role=True, first=1, last=300, settled=True, state=p.Accepted()
    )


def _frames(raw: bytes) -> list[f.Frame]:
    reader = f.FrameReader(4096)
    reader.wants_header = False
    return list(reader.feed(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b"\0\0\x20\0\x02\0\0\0",  # over the limit
        b"\0\0\0\x08\x01\0\0\0",  # data offset within the head
        b"\0\0\0\x08\x03\0\0\0",  # data offset beyond the end
        b"\0\0\0\x08\x02\x05\0\0",  # unknown type
    ],
)
def test_a_wrong_frame_is_a_fault(raw: bytes) -> None:
    with pytest.raises(Fault):
        _frames(raw)


@pytest.mark.parametrize(
    "value",
    [
        t.Described(t.Ulong(0x10), []),  # no container id
        t.Described(t.Ulong(0x10), [5]),  # container id of a wrong type
        t.Described(t.Ulong(0x11), [None, -1, 0, 0]),
        t.Described(t.Ulong(0x18), [None, None]),  # too many fields
        t.Described(t.Ulong(0x99), []),
        t.Described(t.Ulong(0x12), "text"),
        "no composite",
    ],
    ids=str,
)
def test_a_wrong_performative_is_a_fault(value: object) -> None:
    raw = t.encode(value)
    with pytest.raises(Fault):
        p.decode(raw, 0, len(raw))
