"""Clients of the RocketMQ listener: limits of the state that the broker keeps for them, and the user of a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from basaltmq.broker.auth.permissions import WRITE
from basaltmq.errors import AccessRefusedError
from basaltmq.protocols.rocketmq import clients as clients_module
from basaltmq.protocols.rocketmq import sessions
from basaltmq.protocols.rocketmq.clients import ALIVE_S, FORGET_EVERY_S, Clients
from basaltmq.protocols.rocketmq.rules.status import Refused
from basaltmq.wire import rocketmq_wire_pb2 as wire


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def settings(*topics: str) -> wire.TelemetryCommand:
    made = wire.TelemetryCommand()
    made.settings.publishing.topics.extend([wire.Resource(name=each) for each in topics])
    return made


def caller(clients: Clients, may: Any = lambda kind, name: True) -> Any:
    host = SimpleNamespace(clients=clients, settings=SimpleNamespace(body_bytes_max=4 << 20))
    return SimpleNamespace(client=clients.require("c"), host=host, may=may)


@pytest.mark.promise("P8")
def test_clients_are_limited_and_looked_through_once_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "CLIENTS_MAX", 3)
    clock = Clock()
    clients = Clients(clock)
    for name in "abc":
        clients.require(name)
    with pytest.raises(Refused, match="limit of 3 clients") as caught:
        clients.require("d")
    assert caught.value.code == wire.TOO_MANY_REQUESTS
    assert clients.require("a").id == "a"
    clock.now_s += ALIVE_S + FORGET_EVERY_S
    clients.require("a")
    clients.require("d")
    assert len(clients) == 2, "those that are not alive are forgotten"


@pytest.mark.promise("P8")
def test_settings_of_clients_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients_module, "SETTINGS_BYTES_MAX", 100)
    monkeypatch.setattr(clients_module, "ALL_SETTINGS_BYTES_MAX", 150)
    clients = Clients(Clock())
    one, other = clients.require("one"), clients.require("other")
    with pytest.raises(Refused):
        clients.check_settings(one, 101)
    for size in (100, 90, 100):
        clients.check_settings(one, size)
    with pytest.raises(Refused):
        clients.check_settings(other, 51)
    clients.check_settings(other, 50)
    clients.remove(one)
    clients.remove(one)
    clients.check_settings(other, 100)


@pytest.mark.promise("P8")
def test_a_client_that_does_not_read_its_settings_is_not_read_either() -> None:
    taken: list[int] = []

    async def requests() -> AsyncIterator[wire.TelemetryCommand]:
        for number in range(100):
            taken.append(number)
            yield settings("t")

    async def test() -> None:
        answers = sessions.telemetry(requests(), caller(Clients(Clock())))
        for number in range(1, 4):
            assert (await anext(answers)).status.code == wire.OK
            await asyncio.sleep(0.01)
            assert len(taken) == number
        await answers.aclose()

    asyncio.run(test())


def test_a_producer_gets_no_transactions_of_topics_that_it_may_not_write() -> None:
    async def requests() -> AsyncIterator[wire.TelemetryCommand]:
        yield settings("mine", "theirs")

    async def test() -> None:
        made = caller(Clients(Clock()), lambda kind, name: (kind, name) == (WRITE, "mine"))
        answers = sessions.telemetry(requests(), made)
        assert (await anext(answers)).status.code == wire.OK
        assert list(made.client.publishes) == ["mine"]
        await answers.aclose()

    asyncio.run(test())


def test_releasing_messages_of_a_group_needs_the_permission_to_read() -> None:
    def refuse(name: str) -> None:
        raise AccessRefusedError(name)

    made = caller(Clients(Clock()))
    made.check_read = refuse
    request = wire.NotifyClientTerminationRequest(group=wire.Resource(name="g"))
    with pytest.raises(AccessRefusedError, match="g"):
        sessions.notify_client_termination(request, made)
