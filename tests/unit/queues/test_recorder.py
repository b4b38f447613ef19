"""Lifecycle events: recorded by each operation, in order, bounded, only for written changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.queues.conftest import MS, START_NS, Clock, TestStore, settle

from basaltmq.errors import CorruptionError, InvalidConfigError, StoreStalledError
from basaltmq.queues.draft import Draft
from basaltmq.queues.events.event import BlockEncoder, Event, Kind, decode_events, encode_block
from basaltmq.queues.events.recorder import FLUSH_BYTES, Recorder
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.keys.queues import message_key

Make = Callable[..., str]


@pytest.fixture
def recorder(plane: QueuePlane) -> Recorder:
    recorder = Recorder()
    plane.record_events(recorder)
    return recorder


def reported(recorder: Recorder) -> list[Event]:
    blocks, count = recorder.take()
    events = list(decode_events(b"".join(blocks)))
    assert len(events) == count
    assert recorder.waiting_bytes == 0
    return events


def seen(recorder: Recorder) -> list[tuple[str, str, int | None]]:
    return [(event.kind.name.lower(), event.queue, event.attempts) for event in reported(recorder)]


def test_events_have_times_consumer_and_latency(
    plane: QueuePlane, make: Make, clock: Clock, recorder: Recorder
) -> None:
    make("q")
    (message_id,) = plane.enqueue("q", [Draft(payload=b"x" * 5000, fairness_key="tenant")])
    clock.pass_ms(7)
    (held,) = plane.lease("q", consumer="worker")
    clock.pass_ms(5)
    plane.ack("q", held.token)
    came, leased, acked = reported(recorder)
    assert came == Event(Kind.ENQUEUED, "q", message_id, "tenant", None, START_NS, START_NS, None, "")
    assert leased == Event(Kind.LEASED, "q", message_id, "tenant", None, START_NS + 7 * MS, START_NS, 0, "worker")
    assert acked.kind is Kind.ACKED
    assert acked.consumer == "worker"
    assert acked.at_ns - acked.enqueued_ns == 12 * MS


def test_events_of_failures_expiry_and_dead_letters_have_attempts(
    plane: QueuePlane, make: Make, clock: Clock, recorder: Recorder
) -> None:
    make("q", attempts_max=2, dead_letter_queue="dead", visibility_timeout_ms=100)
    plane.enqueue("q", [b"a"])
    plane.nack("q", plane.lease("q")[0].token)
    assert seen(recorder) == [("enqueued", "q", None), ("leased", "q", 0), ("nacked", "q", 1)]
    plane.lease("q")
    clock.pass_ms(101)
    settle(plane, clock)
    assert seen(recorder) == [
        ("leased", "q", 1),
        ("lapsed", "q", 2),
        ("dead_lettered", "q", 2),
        ("enqueued", "dead", None),
    ]
    make("short", ttl_ms=10)
    plane.enqueue("short", [b"a", Draft(payload=b"b", fairness_key="k")])
    clock.pass_ms(11)
    settle(plane, clock)
    kinds = seen(recorder)[2:]
    assert sorted(kinds) == [("dropped", "short", 0)] * 2 + [("expired", "short", 0)] * 2


def test_events_of_priorities_delays_and_direct_deliveries(plane: QueuePlane, make: Make, recorder: Recorder) -> None:
    make("p", priorities_max=9)
    plane.enqueue("p", [Draft(payload=b"", priority=3, fairness_key="a|b"), Draft(payload=b"", delay_ms=50)])
    assert [(e.fairness_key, e.priority) for e in reported(recorder)] == [("a|b", 3), ("default", 0)]
    with plane.change():
        (held,) = plane.deliver("p", [b"now"], consumer="c")
        plane.ack("p", held.token)
    assert [e.kind for e in reported(recorder)] == [Kind.ENQUEUED, Kind.LEASED, Kind.ACKED]


@pytest.mark.promise("P2")
def test_a_failed_change_emits_no_events(plane: QueuePlane, make: Make, store: TestStore, recorder: Recorder) -> None:
    make("q")
    store.refuse = 1
    with pytest.raises(StoreStalledError):
        plane.enqueue("q", [b"a"])
    assert reported(recorder) == []
    plane.enqueue("q", [b"a"])
    store.refuse = 1
    with pytest.raises(StoreStalledError):
        plane.lease("q")
    assert [e.kind for e in reported(recorder)] == [Kind.ENQUEUED]


@pytest.mark.promise("P8")
def test_events_over_the_limit_are_dropped_and_counted(plane: QueuePlane, make: Make) -> None:
    make("q")
    calls: list[str] = []
    recorder = Recorder(
        waiting_bytes_max=FLUSH_BYTES + 4000,
        on_first=lambda: calls.append("first"),
        on_full=lambda: calls.append("full"),
    )
    plane.record_events(recorder)
    for _ in range(400):
        plane.enqueue("q", [b""] * 200)
    assert calls == ["first", "full"]
    assert recorder.dropped > 0
    assert recorder.recorded + recorder.dropped == 80_000
    assert recorder.waiting_bytes <= FLUSH_BYTES + 4000
    assert len(reported(recorder)) == recorder.recorded
    plane.enqueue("q", [b""])
    assert calls == ["first", "full", "first"]
    assert plane.stats("q")["ready"] == 80_001


def test_a_sample_has_all_events_of_the_sampled_messages(plane: QueuePlane, make: Make) -> None:
    make("q")
    recorder = Recorder(sample=0.25)
    plane.record_events(recorder)
    for _ in range(40):
        plane.enqueue("q", [b""] * 100)
        plane.ack("q", plane.lease("q", 100)[0].token)
    lives: dict[bytes, list[Kind]] = {}
    for event in reported(recorder):
        lives.setdefault(event.message_id, []).append(event.kind)
    assert 800 < len(lives) < 1200
    assert all(life == [Kind.ENQUEUED, Kind.LEASED, Kind.ACKED] for life in lives.values())
    plane.record_events(None)
    plane.enqueue("q", [b""] * 100)
    assert reported(recorder) == []
    for wrong in (0, -1, 1.5, float("nan"), True, "1"):
        with pytest.raises(InvalidConfigError):
            Recorder(sample=wrong)  # type: ignore[arg-type]


def test_damaged_block_is_reported_and_empty_value_has_no_events() -> None:
    keys = [message_key("q", "k", 7, bytes(15) + b"%d" % number) for number in range(2)]
    block = encode_block(Kind.LEASED, 0, 5, "c", keys, b"\0\0\0\1\0\0\0\2")
    assert [event.attempts for event in decode_events(block)] == [1, 2]
    assert list(decode_events(b"")) == []
    for damaged in (
        block[:-1],
        block + b"\0",
        block[:4] + b"\2" + block[5:],
        block[:5] + b"\x63" + block[6:],
        block[:15] + b"\xff" + block[16:],
        block[:6] + b"\3" + block[7:],
    ):
        with pytest.raises(CorruptionError, match="damaged block"):
            list(decode_events(damaged))


def test_messages_that_differ_only_by_id_are_encoded_by_id() -> None:
    keys = [message_key("q", "k", 7, bytes(15) + b"%d" % number) for number in range(3)]
    ids = [key[-16:] for key in keys]
    encoder = BlockEncoder()
    for kind, at_ns, consumer, count in (
        (Kind.ACKED, 6, "c", 3),
        (Kind.LEASED, 5, "", 3),
        (Kind.LEASED, 4, "c", 1),
        (Kind.LEASED, 5, "c", 3),
        (Kind.LEASED, 5, "c", 3),
    ):
        block = encoder.encode_alike(kind, at_ns, consumer, keys[0][:-16], b"".join(ids[:count]))
        one_by_one = encode_block(kind, 0, at_ns, consumer, keys[:count])
        assert list(decode_events(block)) == list(decode_events(one_by_one))
        assert encoder.encode_one(kind, at_ns, consumer, keys[0]) == encode_block(kind, 0, at_ns, consumer, keys[:1])
    assert len(block) < len(one_by_one)
    for damaged in (block[:-1], block[:6] + b"\x0c" + block[7:], block[:18] + b"\4" + block[19:], block + b"\0"):
        with pytest.raises(CorruptionError, match="damaged block"):
            list(decode_events(damaged))


def test_lease_event_over_several_calls_has_each_enqueue_time(
    plane: QueuePlane, make: Make, clock: Clock, recorder: Recorder
) -> None:
    make("q")
    sent: list[tuple[bytes, int]] = []
    for _ in range(3):
        clock.pass_ms(1)
        sent += [(message_id, clock()) for message_id in plane.enqueue("q", [b"x"] * 2)]
    held = plane.lease("q", 5)
    plane.ack("q", held[0].token)
    plane.ack("q", plane.lease("q", 5)[0].token)
    events = reported(recorder)
    for kind in (Kind.ENQUEUED, Kind.LEASED, Kind.ACKED):
        assert [(e.message_id, e.enqueued_ns) for e in events if e.kind is kind] == sent


@pytest.mark.parametrize(
    "places",
    [
        [("k", 7, 1)],
        [("k", 7, 1), ("k", 7, 2), ("k", 7, 3)],
        [("k", 7, 1), ("k", 8, 2)],
        [("k", 7, 1), ("long", 7, 2), ("", 9, 3)],
        [("kk", 7, 1), ("ll", 7, 2)],
        [("", 0, 0), ("", 0, 1), ("", 0, 1 << 40)],
    ],
)
def test_all_keys_round_trip_in_events(places: list[tuple[str, int, int]]) -> None:
    keys = [message_key("q", sub, at_ns, number.to_bytes(16, "big")) for sub, at_ns, number in places]
    block = encode_block(Kind.ENQUEUED, 0, 5, "", keys)
    found = [(e.fairness_key, e.enqueued_ns, int.from_bytes(e.message_id, "big")) for e in decode_events(block)]
    assert found == places
    assert {event.queue for event in decode_events(block)} == {"q"}
