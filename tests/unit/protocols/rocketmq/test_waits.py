"""Receive calls of many groups that wait for one topic are woken in portions (P13)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.broker.rig import run, turns
from tests.unit.protocols.rocketmq.test_new_groups import host_of

from basaltmq.broker.vhost import VHost
from basaltmq.protocols.rocketmq.host import WOKEN_PER_TURN, Host

pytestmark = [pytest.mark.spec("G3"), pytest.mark.promise("P13")]


class Waiting:
    """A call that ends when it is woken."""

    def __init__(self, host: Host, woken: list[Any]) -> None:
        self.topic: Any = SimpleNamespace(name="t")
        self._host = host
        self._woken = woken

    def wake(self) -> None:
        self._woken.append(self)
        self._host.waits(self, is_waited=False)


def test_calls_that_wait_for_a_topic_are_woken_over_several_turns() -> None:
    async def work(vhost: VHost) -> None:
        host = host_of(vhost)
        woken: list[Any] = []
        all_waiting = [Waiting(host, woken) for _ in range(5 * WOKEN_PER_TURN)]
        for each in all_waiting:
            host.waits(each, is_waited=True)
        for _ in range(3):
            vhost.streams.notify("t")
        counts = [len(woken)]
        for _ in range(10):
            await turns(1)
            counts.append(len(woken))
        assert counts[:6] == [min(WOKEN_PER_TURN * turn, len(all_waiting)) for turn in range(1, 7)]
        assert woken == all_waiting, "each one once, in order"
        host.close()

    run(work)
