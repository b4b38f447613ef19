"""The path of a message in docs/ARCHITECTURE.md is what the code does, call by call."""

from __future__ import annotations

import asyncio
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.amqp091 import Harness
from tests.unit.protocols.amqp091.test_connection import Socket, in_harness, opened
from tests.unit.protocols.amqp091.wire import publish

import basaltmq
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.method_codec import encode_method

PAGE = Path(__file__).parents[4] / "docs" / "ARCHITECTURE.md"
SOURCE = f"{Path(basaltmq.__file__).parent}/"
PERSISTENT = b"\x10\x00\x02"
WAIT_S = 30.0

Call = tuple[str, str]
"""A module and a function in it."""


def documented() -> list[Call]:
    """Return the calls of the section, in order: a path in code style, followed by a function in code style."""
    section = PAGE.read_text().split("## The path of an AMQP message")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][2:]
    spans = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    return [(path, name) for path, name in pairwise(spans) if path.endswith(".py")]


class Calls:
    """Records the calls into the product of one event loop."""

    def __init__(self) -> None:
        self.seen: list[Call] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE):
            self.seen.append((code.co_filename.removeprefix(SOURCE), code.co_qualname))

    async def until(self, call: Call) -> None:
        """Wait until a call was made."""
        async with asyncio.timeout(WAIT_S):
            while call not in self.seen:  # noqa: ASYNC110 the calls are recorded, not signalled
                await asyncio.sleep(0.001)


def test_a_message_takes_the_documented_path() -> None:
    calls = Calls()

    async def scenario(harness: Harness) -> None:
        connection, socket = await opened(harness)
        assert isinstance(socket, Socket)
        harness.vhost.declare_queue("path", durable=True)
        connection.data_received(encode_method(1, m.ConfirmSelect(False)))
        connection.data_received(encode_method(1, m.BasicConsume(0, "path", "tag", False, False, False, False, {})))
        await asyncio.sleep(0.01)
        before = sys.getprofile()
        sys.setprofile(calls)
        try:
            connection.data_received(publish(b"body", key="path", properties=PERSISTENT))
            await calls.until(("protocols/amqp091/channel.py", "Channel.deliver"))
            await calls.until(("protocols/amqp091/confirms.py", "Confirms.answer"))
            connection.data_received(encode_method(1, m.BasicAck(1, False)))
            await calls.until(("queues/queue.py", "Queue.ack"))
        finally:
            sys.setprofile(before)

    in_harness(scenario)
    path = documented()
    assert len(path) > 20
    remaining = iter(calls.seen)
    missing = [call for call in path if call not in remaining]
    assert missing == [], "these calls do not occur, or not in this order"
    entries = {name for file, name in calls.seen if file == "broker/vhost.py"} - {"VHost._require_up"}
    assert entries == {"VHost.check_exchange", "VHost.publish_many", "VHost._ready", "VHost.settle"}
