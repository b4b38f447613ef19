"""A virtual host against a model: topology, publishing, settling, restarts, and a full drain."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.unit.broker.rig import PERSISTENT, TRANSIENT, Clock, FakePublisher, settlement, until

from basaltmq.broker.vhost import ACK, REJECT, REQUEUE, VHost
from basaltmq.errors import QueueNotFoundError
from basaltmq.store.memory import MemoryStore

NAMES = ("q0", "q1", "q2", "dead")
PATTERNS = ("a.*", "#", "a.b", "*.c")
KEYS = ("a.b", "a.c", "b.c", "d")
MATCHES = {"a.*": ("a.b", "a.c"), "#": KEYS, "a.b": ("a.b",), "*.c": ("a.c", "b.c")}


class Entry:
    """A message of the model."""

    def __init__(self, place: int, body: bytes, persistent: bool) -> None:
        self.place = place
        self.body = body
        self.persistent = persistent
        self.delivered = False


class Held:
    """A delivery that is not settled."""

    def __init__(self, queue: str, entry: Entry, delivery: Any, boot: int) -> None:
        self.queue = queue
        self.entry = entry
        self.delivery = delivery
        self.boot = boot


class BrokerMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = MemoryStore()
        self.clock = Clock()
        self.places = count(1)
        self.numbers = count(1)
        self.boot = 0
        self.publisher = FakePublisher()
        self.durable: dict[str, bool] = {}
        self.ready: dict[str, list[Entry]] = {}
        self.out: dict[str, list[Entry]] = {}
        self.bindings: set[tuple[str, str]] = set()
        self._open()

    def _open(self) -> None:
        async def start() -> VHost:
            vhost = VHost("/", self.store, clock_ns=self.clock)
            vhost.start()
            return vhost

        self.vhost = self.loop.run_until_complete(start())

    @rule(name=st.sampled_from(NAMES), durable=st.booleans())
    def declare(self, name: str, durable: bool) -> None:
        if name in self.durable:
            return
        arguments = {} if name == "dead" else {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        self.vhost.declare_queue(name, durable=durable, arguments=arguments)
        self.durable[name], self.ready[name], self.out[name] = durable, [], []

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        assert self.vhost.delete_queue(name) == len(self.ready.get(name, []))
        self._forget(name)

    def _forget(self, name: str) -> None:
        for known in (self.durable, self.ready, self.out):
            known.pop(name, None)
        self.bindings = {each for each in self.bindings if each[0] != name}

    @rule(name=st.sampled_from(NAMES), pattern=st.sampled_from(PATTERNS))
    def bind(self, name: str, pattern: str) -> None:
        if name not in self.durable:
            with pytest.raises(QueueNotFoundError):
                self.vhost.bind_queue(name, "amq.topic", pattern)
            return
        assert self.vhost.bind_queue(name, "amq.topic", pattern) is ((name, pattern) not in self.bindings)
        self.bindings.add((name, pattern))

    @rule(data=st.data())
    @precondition(lambda self: bool(self.bindings))
    def unbind(self, data: st.DataObject) -> None:
        name, pattern = data.draw(st.sampled_from(sorted(self.bindings)))
        assert self.vhost.unbind_queue(name, "amq.topic", pattern)
        assert not self.vhost.unbind_queue(name, "amq.topic", pattern)
        self.bindings.remove((name, pattern))

    @rule(key=st.sampled_from((*KEYS, *NAMES)), persistent=st.booleans(), size=st.sampled_from([10, 300, 5000]))
    def publish(self, key: str, persistent: bool, size: int) -> None:
        number = next(self.numbers)
        body = (b"%d" % number).ljust(size)
        exchange = "" if key in NAMES else "amq.topic"
        raw = PERSISTENT if persistent else TRANSIENT
        self.vhost.publish(self.publisher, exchange, key, raw, body, mandatory=True, number=number)
        if exchange:
            targets = {name for name, pattern in self.bindings if key in MATCHES[pattern]}
        else:
            targets = {key} & self.durable.keys()
        for name in targets:
            self.ready[name].append(Entry(next(self.places), body, persistent))

        async def confirmed() -> None:
            await until(lambda: ("ack", number) in self.publisher.reported)

        self.loop.run_until_complete(confirmed())
        returned = [reported for reported in self.publisher.reported if reported[0] == "returned"]
        assert bool(returned) is not bool(targets)
        self.publisher.reported.clear()

    @rule(target=held, name=st.sampled_from(NAMES))
    def get(self, name: str) -> Held | None:
        if name not in self.durable:
            with pytest.raises(QueueNotFoundError):
                self.vhost.get(name)
            return None
        got = self.vhost.get(name)
        ready = self.ready[name]
        if not ready:
            assert got is None
            return None
        assert got is not None
        entry = ready.pop(0)
        assert (got[0].payload, got[1]) == (entry.body, len(ready))
        assert got[0].redelivered or not entry.delivered
        entry.delivered = True
        self.out[name].append(entry)
        return Held(name, entry, got[0], self.boot)

    @rule(one=consumes(held), outcome=st.sampled_from([ACK, REQUEUE, REJECT]))
    def settle(self, one: Held | None, outcome: str) -> None:
        if one is None:
            return
        self.vhost.settle([settlement(one.queue, one.delivery, outcome)])
        self.loop.run_until_complete(asyncio.sleep(0))
        out = self.out.get(one.queue, [])
        if one.boot != self.boot or one.entry not in out:
            return
        out.remove(one.entry)
        if outcome == REQUEUE:
            self.ready[one.queue].append(one.entry)
            self.ready[one.queue].sort(key=lambda each: each.place)
        elif outcome == REJECT and one.queue != "dead" and "dead" in self.durable:
            self.ready["dead"].append(
                Entry(next(self.places), one.entry.body, one.entry.persistent and self.durable[one.queue])
            )

    @rule(name=st.sampled_from(NAMES))
    @precondition(lambda self: bool(self.durable))
    def purge(self, name: str) -> None:
        if name in self.durable:
            assert sum(self.vhost.purging(name)) == len(self.ready[name])
            self.ready[name].clear()

    @rule()
    def restart(self) -> None:
        self.loop.run_until_complete(self.vhost.close())
        self.clock.pass_ms(5)
        self.boot += 1
        for name in [each for each, durable in self.durable.items() if not durable]:
            self._forget(name)
        for name, entries in self.ready.items():
            survived = [each for each in entries + self.out[name] if each.persistent]
            self.ready[name] = sorted(survived, key=lambda each: each.place)
            self.out[name] = []
        self._open()
        bound = {(each.destination.name, each.routing_key) for each in self.vhost.topology.bindings()}
        assert bound == self.bindings
        # Messages leased before the restart are ready again when their leases expire.
        self.vhost.plane.run_due()

    def teardown(self) -> None:
        if not hasattr(self, "vhost"):
            return
        assert {name: queue.declared.durable for name, queue in self.vhost.queues.by_name.items()} == self.durable
        for name, entries in self.ready.items():
            for entry in entries:
                got = self.vhost.get(name, no_ack=True)
                assert got is not None
                assert got[0].payload == entry.body
            assert self.vhost.get(name) is None
        self.loop.run_until_complete(self.vhost.close())
        self.loop.close()


@pytest.mark.spec("E6", "E7", "E10")
@pytest.mark.promise("P3", "P10")
def test_virtual_host_matches_the_model() -> None:
    run_state_machine_as_test(BrokerMachine, settings=settings(max_examples=50, stateful_step_count=40, deadline=None))
