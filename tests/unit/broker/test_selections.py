"""Consumers with filters: how long one turn looks for messages that a filter accepts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.broker.rig import FakePublisher, FakeSink, publish, run, until

from basaltmq.broker.consumers import stream_queue
from basaltmq.broker.consumers.dispatch import SERVE_S
from basaltmq.broker.consumers.picker import CHOOSE_S, PAGE
from basaltmq.broker.consumers.selection import Selection
from basaltmq.broker.vhost import VHost

MESSAGES = 3 * PAGE
STEP_S = CHOOSE_S / 4


class SlowFilter:
    """Accepts every second message. The clock moves with each message it looks at."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.seen: list[bytes] = []

    def clock_s(self) -> float:
        return self.now_s

    def __call__(self, delivery: Any) -> bool:
        self.now_s += STEP_S
        self.seen.append(delivery.payload)
        return len(delivery.payload) % 2 == 0


@pytest.mark.promise("P13")
@pytest.mark.parametrize("kind", ["lease", "copy", "stream"])
def test_a_turn_evaluates_a_slow_filter_for_a_short_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [b"x" * (number % 7) + b"%03d" % number for number in range(MESSAGES)]
    slow = SlowFilter()

    async def test(vhost: VHost) -> None:
        vhost.declare_queue("q", durable=True, arguments={"x-queue-type": "stream"} if kind == "stream" else {})
        publisher = FakePublisher()
        publish(vhost, publisher, "q", *bodies)
        await until(lambda: len(publisher.reported) == MESSAGES)
        monkeypatch.setattr(stream_queue, "perf_counter", slow.clock_s)
        monkeypatch.setattr(vhost.tick.dispatch, "_clock_s", slow.clock_s)
        monkeypatch.setattr(vhost.tick.dispatch._picker, "_clock_s", slow.clock_s)
        sink = FakeSink(vhost)
        vhost.subscribe(
            "q",
            sink,
            tag="t",
            no_ack=False,
            exclusive=False,
            priority=0,
            prefetch=MESSAGES,
            arguments={"x-stream-offset": "first"} if kind == "stream" else {},
            owner=object(),
            selection=Selection(slow, is_copy=kind == "copy"),
        )
        most, before = 0, 0
        async with asyncio.timeout(20):
            while len(slow.seen) < MESSAGES:
                await asyncio.sleep(0)
                most, before = max(most, len(slow.seen) - before), len(slow.seen)
        assert most <= (SERVE_S + CHOOSE_S) / STEP_S
        await asyncio.sleep(0)
        assert slow.seen == bodies, "each message once, in order"
        assert sink.payloads() == [body for body in bodies if len(body) % 2 == 0]

    run(test)
